"""``context_management`` of the messages API: old results of tools, and old thoughts, that the model shall not see.

As https://platform.claude.com/docs/en/build-with-claude/context-editing describes it. A cleared result may stay in the
prompt for as long as there is much room, because the conversation's KV holds it: see `cleared` in `docs/prompt.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from start_llm.api.anthropic import shapes
from start_llm.api.common import fields
from start_llm.clients.agent import CLEARED_RESULT
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

    def places(self, messages: Sequence[Message], count: Count) -> list[int]:
        """Of all results but those of the last calls, and of tools that are to be kept."""
        results = [index for index, message in enumerate(messages) if message.role == "tool"]
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        kept = self.exclude_tools or ()
        places = [index for index in results if names.get(messages[index].tool_call_id or "") not in kept]
        places = places[: max(0, len(places) - self.keep.value)]
        by_uses = self.trigger.type == "tool_uses"
        begins = bool(places) and (len(results) if by_uses else count(tuple(messages))) > self.trigger.value
        return places if begins else []

    def without(self, messages: Sequence[Message], places: Sequence[int]) -> tuple[Message, ...]:
        result = _replaced(messages, places, content=CLEARED_RESULT, attachments=(), images=())
        inputs = self.clear_tool_inputs
        if not inputs:
            return result
        ids = {messages[index].tool_call_id for index in places}

        def emptied(call: ToolCall) -> ToolCall:
            is_gone = call.id in ids and (inputs is True or call.name in inputs)
            return replace(call, arguments="{}") if is_gone else call

        return tuple(replace(message, tool_calls=tuple(map(emptied, message.tool_calls))) for message in result)

    def told(self, cleared: int, tokens: int) -> shapes.AppliedEditShape:
        return {"type": TOOL_USES, "cleared_tool_uses": cleared, "cleared_input_tokens": tokens}


class _ClearThinking(fields.BodyModel):
    keep: _Amount | Literal["all"] | Mapping[str, Any] = _Amount(type="thinking_turns", value=1)
    clear_at_least: ClassVar[_Amount | None] = None

    def places(self, messages: Sequence[Message], count: Count) -> list[int]:
        """Of all thoughts but those of the last turns that have some."""
        places = [index for index, message in enumerate(messages) if message.reasoning]
        return places[: max(0, len(places) - self.keep.value)] if isinstance(self.keep, _Amount) else []

    def without(self, messages: Sequence[Message], places: Sequence[int]) -> tuple[Message, ...]:
        return _replaced(messages, places, reasoning=None)

    def told(self, cleared: int, tokens: int) -> shapes.AppliedEditShape:
        return {"type": THINKING, "cleared_thinking_turns": cleared, "cleared_input_tokens": tokens}


Edit = _ClearToolUses | _ClearThinking


def _replaced(messages: Sequence[Message], places: Sequence[int], **changes: Any) -> tuple[Message, ...]:
    """All messages, those at `places` with other fields."""
    there = frozenset(places)
    return tuple(replace(message, **changes) if index in there else message for index, message in enumerate(messages))


def edits_of(given: Any) -> tuple[Edit, ...]:
    """The edits that a body asks for, in its order. Raises BadRequest.

    A compaction by the server is not made, and the answer lists none.
    """
    if given is None:
        return ()
    found: list[Edit] = []
    edits = fields.object_of(given, "context_management").get("edits") or []
    for where, item in fields.items_of(edits, "context_management.edits"):
        kind = fields.object_of(item, where).get("type")
        if kind not in (TOOL_USES, THINKING, COMPACT):
            raise fields.bad(f"{where}.type", f"{TOOL_USES}, {THINKING} or {COMPACT}", kind)
        if kind != COMPACT:
            body: type[_ClearToolUses] | type[_ClearThinking] = _ClearToolUses if kind == TOOL_USES else _ClearThinking
            found.append(fields.validate(body, item, f"{where}."))
    return tuple(found)


def apply(
    messages: tuple[Message, ...], edits: Sequence[Edit], count: Count
) -> tuple[tuple[Message, ...], list[shapes.AppliedEditShape]]:
    """The conversation as the model shall see it, and what the answer says of each edit that was made.

    Args:
        count: tokens of the prompt that these messages make, as the client is told them; asked only where it decides.
    """
    applied: list[shapes.AppliedEditShape] = []
    for edit in edits:
        places, least = edit.places(messages, count), edit.clear_at_least
        if not places:
            continue
        cleared = edit.without(messages, places)
        tokens = max(0, count(messages) - count(cleared))
        if least is None or tokens >= least.value:
            messages = cleared
            applied.append(edit.told(len(places), tokens))
    return messages, applied
