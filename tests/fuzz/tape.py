"""JSON out of a string of bytes: what a client would send, with something else in some places.

`Tape` turns bytes into choices, one byte each. That is ten times quicker than a strategy for every field. One that has
run out makes the first choice everywhere, which is the plainest body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Make = Callable[["Tape"], Any]
Fields = dict[str, Make]

STRANGE = 60
"""One field in so many is anything at all."""


class Tape:
    """Choices, read from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, most: int) -> int:
        """A number from 0 to `most` - 1, at most 255."""
        byte = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return byte % most

    def pick[T](self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


DEEP_TEXT = '{"a":' * 3_000 + "1" + "}" * 3_000
NUMBERS = [
    1, 0, -1, 2, 5, 64, 65, 4096, 10**6, 2**31, 2**63, -(2**63), 2**64, 10**60, 10**400, 0.5, 1.0, -0.0, 1e-300, 1e300,
]  # fmt: skip
TEXTS = [
    "Hi", "", " ", "x", "none", "auto", "text", "type", "user", "null", "true", "0", "\x00", "é", "\U0001f600",
    "\ud83d", "<think>", "</think>", "<tool_call>", "<|im_end|>", "<|im_start|>", "[[truth]]", "{", "{}", "[]", "NaN",
    "5", "-1", "f", '{"a": 1}', '{"session_id": 5}', DEEP_TEXT, "9" * 5_000, "read", "a\nb", "../../x", "{{ 1/0 }}",
    "%s%n", "x" * 600,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, [], {}, [[]], [{}], [None], {"": None}, {"type": "none"}, {"type": ["text"]}, {"type": {"a": 1}},
    ["a", 1, None], {"a": {"b": []}}, deep(40), [deep(40)], [0] * 300, {str(i): i for i in range(120)}, [[[]]], [""],
]  # fmt: skip
NAMES = ["type", "text", "name", "role", "content", "id", "function", "a", ""]


def leaf(tape: Tape) -> Any:
    return tape.pick(tape.pick((VALUES, NUMBERS, TEXTS)))


def anything(tape: Tape) -> Any:
    kind = tape.below(6)
    if kind == 4:
        return [leaf(tape) for _ in range(tape.below(4))]
    if kind == 5:
        return {tape.pick(NAMES): leaf(tape) for _ in range(tape.below(4))}
    return leaf(tape)


def field(*valid: Make) -> Make:
    """Mostly valid."""

    def make(tape: Tape) -> Any:
        return anything(tape) if tape.below(STRANGE) == STRANGE - 1 else tape.pick(valid)(tape)

    return make


def one(*values: Any) -> Make:
    return field(lambda tape: tape.pick(values))


def some(make: Make, most: int = 3, least: int = 0) -> Make:
    """A list."""
    return field(lambda tape: [make(tape) for _ in range(least + tape.below(most - least + 1))])


class Record:
    """An object that mostly has its required members, and at most `most` of the optional ones."""

    def __init__(self, required: Fields, optional: Fields | None = None, most: int = 3) -> None:
        self._required, self._most = required, most
        self._optional = {name: make for name, make in (optional or {}).items() if name not in required}
        self._some = sorted(self._optional)

    def __call__(self, tape: Tape) -> Any:
        if tape.below(STRANGE) == STRANGE - 1:
            return anything(tape)
        made = {name: make(tape) for name, make in self._required.items() if tape.below(120) != 119}
        for _ in range(tape.below(self._most + 1) if self._some else 0):
            name = tape.pick(self._some)
            made[name] = self._optional[name](tape)
        return made


def mapping(names: Sequence[str], make: Make, most: int = 3) -> Make:
    return field(lambda tape: {tape.pick(names): make(tape) for _ in range(tape.below(most + 1))})
