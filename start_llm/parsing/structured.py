"""From what a request demands of its answer to a grammar: `make_constraint`. Any thread; nothing is kept.

=================================  ==============================================================================
``response_format`` json_object    one JSON object
``response_format`` json_schema    JSON that validates; an unsupported schema is refused, never weakened
``tool_choice`` required           one to `MOST_CALLS` calls of any tool (exactly one without `parallel_tool_calls`)
``tool_choice`` named              the same, of that tool
auto, with a strict tool           free text; once the format's opening marker is written, the call is held to the
                                   tools' names and schemas (arguments of tools that are not strict: any object)
auto, with a response format       one of the two: JSON text, or calls
=================================  ==============================================================================

Reasoning stays free. Where its tags are tokens, the grammar starts after the closing one (`Constraint.after`); where
they are plain text, the grammar's first part is "anything up to the closing tag".

Known limits: with ``auto``, a marker that the model spells otherwise than its format does (a bare ``<function=`` in
the Qwen format, Hermes JSON in a GLM model) is text to the grammar, though the parser may read it as a call. After
`max_tokens` an answer ends wherever it is. White space and forced calls are bounded; what a schema leaves open is not
(a recursive definition, a string or list without a maximum, the digits of a number), so a weak model may get there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from start_llm.core.errors import BadRequest
from start_llm.core.request import ChatRequest, ResponseFormat
from start_llm.core.work import Constraint
from start_llm.parsing.structured_schema import any_object, check_schema, embed
from start_llm.parsing.structured_tools import ANY_TEXT, Call, Lark, Markers, as_call, call_grammar, literal

PARAMETERS = {"messages": "input_schema", "responses": "parameters"}
"""What a dialect calls the schema of a tool; the others have ``function.parameters``."""
MOST_CALLS = 16
"""Of one forced answer. Without a limit a weak model that is only asked "another call or the end?" may never stop."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What grammars need to know of a model's text. Made once per model.

    Attributes:
        tool_format: id of the format that the model writes calls in.
        special: token ids of the markers that are tokens, from `special_tokens`.
        reasoning: opening and closing tag, or ``None`` for a model that does not reason.
        answer_starts: token ids that always come before the answer (harmony's final channel); wins over `reasoning`.
    """

    tool_format: str = "hermes_json"
    special: Mapping[str, int] = field(default_factory=dict)
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    answer_starts: tuple[int, ...] = ()


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The added tokens of a Hugging Face tokenizer that llguidance never matches as text."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    return {
        token.content: i
        for i, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def make_constraint(
    request: ChatRequest, model: ModelText, *, in_reasoning: bool = False, may_reason: bool = True
) -> Constraint | None:
    """The grammar that `request` asks for, or ``None`` where its answer is free.

    Args:
        in_reasoning: the prompt ends inside an open reasoning block.
        may_reason: the model may open one itself.

    Raises:
        BadRequest: for an unknown tool, or a schema that is invalid or cannot be enforced; names field and keyword.
    """
    lark, markers = Lark(), Markers(model.special)
    answer = _answer(request, model, lark, markers)
    if answer is None:
        return None
    after, opens = _reasoning_tokens(model, in_reasoning, may_reason)
    if not after and model.reasoning is not None and (in_reasoning or may_reason):
        opening, closing = model.reasoning
        lark.rule("thoughts", f"/{ANY_TEXT}/ {literal(closing)}", "[lazy]")
        thinking = "thoughts" if in_reasoning else f"({literal(opening)} thoughts)?"
        answer = f"{thinking} {answer}"
    lark.rule("start", answer)
    grammar = LLMatcher.grammar_from_lark(lark.text())
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise BadRequest(f"The tools and schemas of this request are too much together: {messages[0].splitlines()[0]}")
    return Constraint(grammar, after=after, wait=bool(after) and not opens, opens=opens)


def _reasoning_tokens(
    model: ModelText, in_reasoning: bool, may_reason: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(`Constraint.after`, `Constraint.opens`); both empty where tags are text or there is no reasoning."""
    if model.answer_starts:
        return model.answer_starts, ()
    if model.reasoning is None:
        return (), ()
    opening, closing = (model.special.get(tag) for tag in model.reasoning)
    if closing is None or (not in_reasoning and (opening is None or not may_reason)):
        return (), ()
    if in_reasoning:
        return (closing,), ()
    assert opening is not None
    return (closing,), (opening,)


def _answer(request: ChatRequest, model: ModelText, lark: Lark, markers: Markers) -> str | None:
    """The start rule's body without reasoning; ``None`` if anything goes."""
    choice = request.tool_choice
    json_text = _json_text(request.response_format)
    if choice.mode in ("required", "named"):
        lark.rule("SPACE", r"/[ \t\r\n]{1,4}/")
        return f"SPACE? {_calls(request, _chosen(request), model, lark, markers)}"
    offered = bool(request.tools) and choice.mode == "auto"
    if json_text is not None:
        lark.rule("SPACE", r"/[ \t\r\n]{1,4}/")
        calls = f" | {_calls(request, range(len(request.tools)), model, lark, markers)}" if offered else ""
        return f"SPACE? (json_text{calls})" if lark.rule("json_text", json_text) else None
    if offered and any(tool.strict for tool in request.tools):
        return _text_and_calls(request, model, lark, markers)
    return None


def _json_text(wanted: ResponseFormat) -> str | None:
    if wanted.kind == "text":
        return None
    if wanted.kind == "json_object":
        return f"%json {embed(any_object())}"
    if wanted.schema is None:
        raise BadRequest(f"{wanted.param} is missing.", param=wanted.param)
    check_schema(wanted.schema, wanted.param)
    return f"%json {embed(wanted.schema)}"


def _chosen(request: ChatRequest) -> Sequence[int]:
    """Indices of the tools that a forced call may use."""
    if not request.tools:
        raise BadRequest(f"tool_choice is {request.tool_choice.mode!r}, but there are no tools.", param="tool_choice")
    if request.tool_choice.mode == "required":
        return range(len(request.tools))
    chosen = [i for i, tool in enumerate(request.tools) if tool.name == request.tool_choice.name]
    if not chosen:
        known = ", ".join(repr(tool.name) for tool in request.tools)
        raise BadRequest(f"tool_choice names {request.tool_choice.name!r}; the tools are {known}.", param="tool_choice")
    return chosen[:1]


def _as_calls(request: ChatRequest, indices: Sequence[int], *, auto: bool) -> list[Call]:
    field_name = PARAMETERS.get(request.dialect, "function.parameters")
    calls = [as_call(request.tools[i], f"tools[{i}].{field_name}") for i in indices]
    if not auto:
        return calls
    return [Call(c.name, any_object(), True, c.param) if c.lenient else c for c in calls]


def _calls(request: ChatRequest, indices: Sequence[int], model: ModelText, lark: Lark, markers: Markers) -> str:
    """A rule for one call, or several where the request allows it."""
    call_format, tail = call_grammar(lark, model.tool_format, _as_calls(request, indices, auto=False), markers)
    opening = markers(call_format.open)
    lark.rule("call", f"{opening} {tail}")
    if not request.parallel_tool_calls:
        return "call"
    between = f"{literal(call_format.between)} " if call_format.between else ""
    return lark.rule("calls", f"call ({between}call){{0,{MOST_CALLS - 1}}}")


def _text_and_calls(request: ChatRequest, model: ModelText, lark: Lark, markers: Markers) -> str:
    """Free text in which an opening marker starts a call that is held to its grammar."""
    calls = _as_calls(request, range(len(request.tools)), auto=True)
    call_format, tail = call_grammar(lark, model.tool_format, calls, markers)
    lark.rule("TEXT", f"/{ANY_TEXT}/")
    lark.rule("end_text", "TEXT")
    if markers.is_token(call_format.open):
        head = lark.rule("head", f"TEXT {markers(call_format.open)}")
    else:
        head = lark.rule("head", f"TEXT {literal(call_format.open)}", "[lazy]")
    lark.rule("text_call", f"{head} {tail}")
    return "text_call* end_text" if request.parallel_tool_calls else "(text_call | end_text)"
