"""From what a request demands of its answer to a grammar: `make_constraint`. Any thread; nothing is kept.

Which request asks for what is told in docs/api.md, "Answers of a given form".

Reasoning stays free:

- Tags that are tokens: the grammar starts after the closing one (`Constraint.after`), and the model may open a block by
  itself (`Constraint.opens`).
- Tags that are plain text: a block that the prompt has opened is the grammar's first part, "anything up to the closing
  tag". The model may not open one itself: where only a tag or the answer may come first, a weak model begins the tag,
  is free from then on, and its answer holds no JSON at all.
- gpt-oss writes messages with headers instead (`_harmony_answer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from start_llm.core.errors import BadRequest
from start_llm.core.limits import SUBSCHEMAS
from start_llm.core.reasoning_tags import REASONING_STYLES, ReasoningStyle
from start_llm.core.request import ChatRequest, ResponseFormat
from start_llm.core.work import Constraint
from start_llm.parsing.schema import dump as literal
from start_llm.parsing.schema_form import ANY_OBJECT, check_schema, embed, size, too_large
from start_llm.parsing.structured_tools import ANY_TEXT, CallableTool, Lark, any_call, as_call, json_arguments

PARAMETERS = {"messages": "input_schema", "responses": "parameters"}
"""What a dialect calls the schema of a tool; the others have ``function.parameters``."""
MOST_CALLS = 16
"""Of one forced answer. Without a limit a weak model that is only asked "another call or the end?" may never stop."""
MOST_THOUGHTS = 8
"""Messages before the one that was asked for."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What grammars need to know of a model's text. Made once per model, by `model_text`."""

    tool_format: str = "hermes_json"  # id of the format that the model writes calls in
    # token ids of the markers that are tokens, from `special_tokens`
    special: Mapping[str, int] = field(default_factory=dict)
    reasoning: ReasoningStyle = REASONING_STYLES["null"]
    # `opening`, `closing`: the first token of the opening tag of its thinking and the tokens of the closing one,
    # ``None`` and ``()`` where these are plain text
    opening: int | None = None
    closing: tuple[int, ...] = ()


def model_text(tool_format: str, reasoning: ReasoningStyle, tokenizer: Any) -> ModelText:
    """With the tags as `tokenizer` (a Hugging Face one) encodes them, where they hold special tokens."""
    special = special_tokens(tokenizer)

    def tokens(tag: str) -> tuple[int, ...]:
        if not any(name in tag for name in special):
            return ()
        return tuple(tokenizer.encode(tag, add_special_tokens=False))

    opening = tokens(reasoning.start)[:1]
    return ModelText(
        tool_format,
        special,
        reasoning,
        opening=opening[0] if opening and opening[0] in special.values() else None,
        closing=tokens(reasoning.end),
    )


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

    The prompt ends inside an open reasoning block (`in_reasoning`), or the model may open one itself, if its tags are
    tokens (`may_reason`). Raises BadRequest for an unknown tool, or a schema that is invalid or cannot be enforced.
    """
    if is_free(request):
        return None
    lark = Lark(model.special, model.tool_format)
    answer = _answer(request, model, lark)
    after: tuple[int, ...] = model.closing if in_reasoning else ()
    opens: tuple[int, ...] = ()
    if in_reasoning and not after and model.reasoning.end:
        lark.rule("thoughts", f"/{ANY_TEXT}/ {literal(model.reasoning.end)}", "[lazy]")
        answer = f"thoughts {answer}"
    elif not in_reasoning and may_reason and model.opening is not None and model.closing:
        after, opens = model.closing, (model.opening,)
    lark.rule("start", answer)
    grammar = LLMatcher.grammar_from_lark("\n".join(lark.rules) + "\n")
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    param = "tools" if request.response_format.kind == "text" else request.response_format.param
    if failed:
        reason = messages[0].splitlines()[0]
        raise BadRequest(f"{param}: the tools and schemas of this request are too much together: {reason}", param=param)
    return Constraint(grammar, after=after, wait=bool(after) and not opens, opens=opens, param=param)


def is_free(request: ChatRequest) -> bool:
    """Whether nothing is asked of the answer's form, so that there is no grammar to make."""
    strict = any(tool.strict for tool in request.tools)
    return request.response_format.kind == "text" and request.tool_choice.mode == "auto" and not strict


def _answer(request: ChatRequest, model: ModelText, lark: Lark) -> str:
    """The start rule's body without reasoning: JSON, calls, or free text beside the calls."""
    json_text = _json_text(request.response_format)
    indices: Sequence[int] = range(len(request.tools)) if request.tool_choice.mode == "auto" else ()
    if request.tool_choice.mode in ("required", "named"):
        json_text, indices, free = None, _chosen(request), False
    else:
        free = json_text is None
    calls = _as_calls(request, indices, auto=free)
    if model.reasoning.channels:
        return _harmony_answer(lark, json_text, calls, free=free)
    if free:
        return _text_and_calls(request, calls, lark)
    lark.rule("SPACE", r"/[ \t\r\n]{1,4}/")
    options = [lark.rule("json_text", json_text)] if json_text is not None else []
    if calls:
        options.append(_calls(request, calls, lark))
    return f"SPACE? ({' | '.join(options)})"


def _json_text(wanted: ResponseFormat) -> str | None:
    if wanted.kind == "text":
        return None
    if wanted.kind == "json_object":
        return f"%json {embed(ANY_OBJECT)}"
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


def _as_calls(request: ChatRequest, indices: Sequence[int], *, auto: bool) -> list[CallableTool]:
    """The tools with what their arguments are held to. Where that is too much, those that are not strict go without."""
    field_name = PARAMETERS.get(request.dialect, "function.parameters")
    tools = [(request.tools[i], f"tools[{i}].{field_name}") for i in indices]
    left = names = SUBSCHEMAS.most
    for tool, param in tools:
        left -= size(tool.parameters) if tool.strict else 0
        if left < 0:
            raise too_large(param)
    calls = []
    for tool, param in tools:
        count = 0 if tool.strict else size(tool.parameters)
        if not tool.strict and (auto or count > left):
            calls.append(any_call(tool, param, names))
            names -= len(calls[-1].keys)
        else:
            left -= count
            calls.append(as_call(tool, param))
    return calls


def _calls(request: ChatRequest, calls: Sequence[CallableTool], lark: Lark) -> str:
    """A rule for one call, or several where the request allows it."""
    opening = f"{lark.marker(lark.calls.open)} " if lark.calls.open else ""
    lark.rule("call", opening + lark.call_tail(calls))
    if not request.parallel_tool_calls:
        return "call"
    between = f"{literal(lark.calls.between)} " if lark.calls.between else ""
    return lark.rule("calls", f"call ({between}call){{0,{MOST_CALLS - 1}}}")


def _text_and_calls(request: ChatRequest, calls: Sequence[CallableTool], lark: Lark) -> str:
    """Free text in which an opening marker starts a call that is held to its grammar; without `calls` none can."""
    opening = lark.calls.open
    if not calls:
        begins = opening or lark.calls.lead(CallableTool("", ANY_OBJECT, True, "")).partition('""')[0]
        without = "" if lark.is_token(opening) else f" & ~/{ANY_TEXT}{regex_to_lark(re.escape(begins))}{ANY_TEXT}/"
        return lark.rule("TEXT", f"/{ANY_TEXT}/{without}")
    lark.rule("TEXT", f"/{ANY_TEXT}/")
    lark.rule("end_text", "TEXT")
    if opening:
        head = lark.rule("head", f"TEXT {lark.marker(opening)}", "" if lark.is_token(opening) else "[lazy]")
        lark.rule("text_call", f"{head} {lark.call_tail(calls)}")
    else:  # a call begins with the text that names its tool
        heads = [
            f"{lark.rule(f'head_{i}', f'TEXT {literal(lark.calls.lead(call))}', '[lazy]')} {body}"
            for i, (call, body) in enumerate(lark.call_bodies(calls))
        ]
        lark.rule("text_call", " | ".join(heads))
    return "text_call* end_text" if request.parallel_tool_calls else "(text_call | end_text)"


def _harmony_answer(lark: Lark, json_text: str | None, calls: Sequence[CallableTool], *, free: bool) -> str:
    """The start rule's body for gpt-oss, which writes messages with headers: ``<|channel|>final<|message|>text``.

    Its reasoning is messages of their own, so the whole answer is one grammar: some messages of thought, then the
    message that was asked for. The prompt ends in ``<|start|>assistant``.

    `json_text` is the rule's body for a final message that is JSON; `free`: it may be any text. One call at most, since
    the token that ends a call ends the answer.
    """
    marker = lark.marker
    lark.rule("SPACE", r"/[ \t\r\n]{1,4}/")
    lark.rule("TEXT", f"/{ANY_TEXT}/")
    before = f'{marker("<|channel|>")} ("analysis" | "commentary") {marker("<|message|>")} TEXT'
    lark.rule("thought", f'{before} {marker("<|end|>")} {marker("<|start|>")} "assistant"')
    final = f'{marker("<|channel|>")} "final" {marker("<|message|>")}'
    options = [f"{final} SPACE? {lark.rule('json_text', json_text)}"] if json_text is not None else []
    if free:
        options.append(f"{final} TEXT")
    if calls:
        head = f'{marker("<|channel|>")} "commentary to=functions."'
        json_type = f'" " {marker("<|constrain|>")}' if lark.is_token("<|constrain|>") else '" "'
        message = f'{json_type} "json" {marker("<|message|>")}'
        bodies = [f"{literal(call.name)} {message} {json_arguments(call)}" for call in calls]
        options.append(f"{head} ({' | '.join(lark.rule(f'call_{i}', body) for i, body in enumerate(bodies))})")
    return f"thought{{0,{MOST_THOUGHTS}}} ({' | '.join(options)})"
