"""Update notes: how it is told that a field, a block or a tool is no longer what the model was shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from start_llm.core.messages import Message
from start_llm.prompt.edits import after_edits, makes_edits
from start_llm.prompt.textdiff import File
from start_llm.prompt.textdiff import changes as text_changes
from start_llm.prompt.turns import Shown, Told
from start_llm.prompt.volatile import Field

NOTE_OPEN = "<update>"
NOTE_CLOSE = "</update>"
_VALUES_INTRO = "Newer than above:"
_DIFF_INTRO = "Changed (diff):"
# Changes of a short block that moves may add up to this many characters before the block is told again.
_CHANGES_LIMIT = 600
# A system text is told as changes if it is long and they are few: one of so many characters at most.
_SHORTEST_HEAD = 1000
_SHARE_OF_HEAD = 4


@dataclass(slots=True)
class Change:
    """A line of the note (none if empty) and the slot's value that it tells; `plain` lines need no word before them."""

    told: Told
    line: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """A field of a request: its name through all requests, its value, and the line that tells it in a note."""

    name: str
    value: str
    line: str
    field: Field

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def told_by(slots: Sequence[Slot]) -> tuple[Told, ...]:
    """What a message tells that shows these fields."""
    told = [(slot.name, slot.value) for slot in slots]
    return (*told, *((patched(slot.name), "0") for slot in slots if slot.kind == "moving"))


def patched(slot: str) -> str:
    """The slot that counts the characters of changes told since a block was shown whole."""
    return f"patched:{slot}"


@dataclass(frozen=True, slots=True)
class Patcher:
    """Tells what changed in a block. `shown`: what the model saw before; `later`: what it answered after that."""

    shown: Sequence[Shown]
    later: Sequence[str] = ()

    def patch(self, slot: Slot, told: dict[str, str]) -> list[Change]:
        """What changed in a block since it was told, as lines; nothing where telling the whole block is better."""
        old, size = told.get(slot.name), len(slot.value)
        answers = self._answers(slot.name) if slot.kind == "moving" else []
        if old == slot.value and ("\n" not in old or not any(map(makes_edits, answers))):
            return [Change((slot.name, slot.value), "", True)]
        if not old or "\n" not in slot.value or slot.kind not in ("context", "moving"):
            return []
        own: list[str] = []

        def edited(was: File | None, now: File) -> bool | None:
            before, after = was.text.rstrip("\n") if was else None, now.text.rstrip("\n")
            made = after_edits(now.name, before, answers)
            if made is None or made.rstrip("\n") == before:
                return None
            same = made.rstrip("\n") == after
            # Such a file takes one line.
            own.extend([now.name] * (same if before != after else not same))
            return same

        text = text_changes(old, slot.value, edited)
        if text is None or len(text) >= size:
            return []
        if not text:
            # The same files, or the same in another order.
            return [Change((slot.name, slot.value), "", True)]
        # Changes to changes add up: a reader should not have to apply more of them than the block is long.
        spent = int(told.get(patched(slot.name), "0")) + len(text)
        if spent >= (max(size, _CHANGES_LIMIT) if slot.kind == "moving" else size):
            return []
        plain = len(own) == text.count("\n") + 1
        return [Change((slot.name, slot.value), text, plain), Change((patched(slot.name), str(spent)), text, plain)]

    def _answers(self, name: str) -> list[str]:
        """The model's answers since the slot was told last."""
        known = max((i for i, shown in enumerate(self.shown) if name in dict(shown.told)), default=-1)
        since = [shown.message for shown in self.shown[known + 1 :]]
        return [*(message.content for message in since if message.role == "assistant"), *self.later]


def head_changes(
    old: Sequence[Shown],
    new: Sequence[tuple[Message, bytes]],
    told: dict[str, str],
    text_of: Callable[[Message], str],
) -> list[Change] | None:
    """What a client changed in its system text in the middle of a conversation; None where it is better shown anew.

    Args:
        old, new: the system messages at the front, as shown and (with their digests) as sent.
        text_of: a message's text without volatile values, which are told by themselves.
    """
    changes: list[Change] = []
    for position, (shown, (message, digest)) in enumerate(zip(old, new, strict=True)):
        name = f"text:{position}"
        if name not in told and shown.digest == digest:
            continue
        text, was = text_of(message), told.get(name) or text_of(shown.message)
        if text == was:
            continue
        lines = text_changes(was, text, name="System text")
        spent = int(told.get(patched(name), "0")) + len(lines or "")
        if lines is None or len(was) < _SHORTEST_HEAD or spent * _SHARE_OF_HEAD > len(was):
            return None
        changes += [Change((name, text), lines), Change((patched(name), str(spent)), lines)]
    return changes


def with_note(shown: list[Shown], changes: Sequence[Change]) -> tuple[int, tuple[str, ...]]:
    """Adds the note to the last message of `shown` that can bear it; its index, and the note's lines."""
    lines = tuple(dict.fromkeys(change.line for change in changes if change.line))
    note = "\n".join([NOTE_OPEN, *_intro(changes), *lines, NOTE_CLOSE])
    places = [index for index, item in enumerate(shown) if item.message.role in ("user", "tool") and not item.transient]
    told = tuple(change.told for change in changes)
    if not places:
        shown.append(Shown(Message("user", note), None, told))
        return len(shown) - 1, lines
    place = places[-1]
    target = shown[place]
    content = f"{target.message.content}\n\n{note}" if target.message.content else note
    shown[place] = replace(target, message=replace(target.message, content=content), told=(*target.told, *told))
    return place, lines


def _intro(changes: Sequence[Change]) -> list[str]:
    told = [change for change in changes if not change.plain]
    diffs = [change.told[0] for change in told if change.told[0].startswith("patched:") and change.told[1] != "0"]
    return [_DIFF_INTRO] if diffs else [_VALUES_INTRO] * bool(told)
