"""``context_management`` of the messages API: old results of tools, and old thoughts, that the model shall not see.

As https://platform.claude.com/docs/en/build-with-claude/context-editing describes it. A cleared result may stay in the
prompt for as long as there is much room, because the conversation's KV holds it: see `cleared` in `docs/prompt.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from start_llm.api.anthropic import shapes
from start_llm.api.common import fields
from start_llm.clients.agent import CLEARED_RESULT
from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, ToolCall

TOOL_USES: Final = "clear_tool_uses_20250919"
THINKING: Final = "clear_thinking_20251015"
COMPACT: Final = "compact_20260112"

Count = Callable[[tuple[Message, ...]], int]


class _Amount(fields.BodyModel):
    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: Annotated[int, Field(ge=0)]


class _ClearToolUses(fields.BodyModel):
    trigger: _Amount = _Amount(type="input_tokens", value=100_000)
    keep: _Amount = _Amount(type="tool_uses", value=3)
    clear_at_least: _Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None  # of these tools; True: of all


class _ClearThinking(fields.BodyModel):
    keep: _Amount | Literal["all"] | Mapping[str, Any] = _Amount(type="thinking_turns", value=1)


Edit = _ClearToolUses | _ClearThinking


def edits_of(given: Any, path: str = "context_management") -> tuple[Edit, ...]:
    """The edits that a body asks for, in its order. Raises BadRequest.

    A compaction by the server is not made, and the answer lists none.
    """
    if given is None:
        return ()
    found: list[Edit] = []
    for where, item in fields.items_of(fields.object_of(given, path).get("edits") or [], f"{path}.edits"):
        kind = fields.object_of(item, where).get("type")
        if kind not in (TOOL_USES, THINKING, COMPACT):
            raise fields.bad(f"{where}.type", f"{TOOL_USES}, {THINKING} or {COMPACT}", kind)
        if kind != COMPACT:
            found.append(_read(_ClearToolUses if kind == TOOL_USES else _ClearThinking, item, where))
    return tuple(found)


def _read[E: _ClearToolUses | _ClearThinking](kind: type[E], item: dict[str, Any], path: str) -> E:
    try:
        return fields.validate(kind, item)
    except BadRequest as error:
        raise BadRequest(f"{path}.{error.message}", param=f"{path}.{error.param}", code=error.code) from None


def apply(
    messages: tuple[Message, ...], edits: Sequence[Edit], count: Count
) -> tuple[tuple[Message, ...], list[shapes.AppliedEditShape]]:
    """The conversation as the model shall see it, and what the answer says of each edit that was made.

    Args:
        count: tokens of the prompt that these messages make, as the client is told them; asked only where it decides.
    """
    applied: list[shapes.AppliedEditShape] = []
    for edit in edits:
        if isinstance(edit, _ClearThinking):
            places, least = _thoughts(messages, edit), None
        else:
            places, least = _results(messages, edit), edit.clear_at_least
        if not places or (isinstance(edit, _ClearToolUses) and not _begins(messages, edit, count)):
            continue
        cleared = _without(messages, set(places), edit)
        tokens = max(0, count(messages) - count(cleared))
        if least is None or tokens >= least.value:
            messages = cleared
            applied.append(_applied(edit, len(places), tokens))
    return messages, applied


def _applied(edit: Edit, cleared: int, tokens: int) -> shapes.AppliedEditShape:
    if isinstance(edit, _ClearThinking):
        return {"type": THINKING, "cleared_thinking_turns": cleared, "cleared_input_tokens": tokens}
    return {"type": TOOL_USES, "cleared_tool_uses": cleared, "cleared_input_tokens": tokens}


def _begins(messages: Sequence[Message], edit: _ClearToolUses, count: Count) -> bool:
    if edit.trigger.type == "tool_uses":
        return sum(message.role == "tool" for message in messages) > edit.trigger.value
    return count(tuple(messages)) > edit.trigger.value


def _results(messages: Sequence[Message], edit: _ClearToolUses) -> list[int]:
    """The places of all results but those of the last calls, and of tools that are to be kept."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    results = [index for index, message in enumerate(messages) if message.role == "tool"]
    kept = edit.exclude_tools or ()
    places = [index for index in results if names.get(messages[index].tool_call_id or "") not in kept]
    return places[: max(0, len(places) - edit.keep.value)]


def _thoughts(messages: Sequence[Message], edit: _ClearThinking) -> list[int]:
    """The places of all thoughts but those of the last turns that have some."""
    if not isinstance(edit.keep, _Amount):
        return []
    places = [index for index, message in enumerate(messages) if message.reasoning]
    return places[: max(0, len(places) - edit.keep.value)]


def _without(messages: Sequence[Message], places: set[int], edit: Edit) -> tuple[Message, ...]:
    result = [_cleared(message) if index in places else message for index, message in enumerate(messages)]
    inputs = edit.clear_tool_inputs if isinstance(edit, _ClearToolUses) else None
    if not inputs:
        return tuple(result)
    ids = {messages[index].tool_call_id for index in places}
    of_some = inputs if isinstance(inputs, list) else None

    def emptied(call: ToolCall) -> ToolCall:
        gone = call.id in ids and (of_some is None or call.name in of_some)
        return replace(call, arguments="{}") if gone else call

    return tuple(replace(message, tool_calls=tuple(map(emptied, message.tool_calls))) for message in result)


def _cleared(message: Message) -> Message:
    if message.role == "tool":
        return replace(message, content=CLEARED_RESULT, attachments=(), images=())
    return replace(message, reasoning=None)
