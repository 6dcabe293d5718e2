"""How `test_belongs` draws what happens: a list of small numbers, so that hypothesis can draw and shrink it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.prompt import client
from tests.prompt.belongs_clients import KINDS
from tests.prompt.belongs_events import EVENTS

HABITS = ("stripped", "kept", "stripped and reserialised", "reserialised", "in content")
ECHOES = [client.ECHOES[habit] for habit in HABITS]
# Sessions and keys of a group's conversations.
NAMES: tuple[tuple[str | None, str | None], ...] = (
    (None, None),
    ("session", None),
    (None, "key"),
    ("session", "key"),
    (None, "backend"),  # one user for many customers
)


@dataclass(frozen=True)
class Group:
    """Conversations that are equal word for word, turn by turn, but for what `private` and `names` say.

    private: each has values and words of its own; else they have the same, and only ids and thoughts differ.
    """

    kind: str
    size: int
    private: bool
    names: int
    echo: int
    thinking: bool


@dataclass(frozen=True)
class Step:
    """`event` number `n` happens to conversation `which`; below 0, to all of group -1 - `which`."""

    which: int
    event: int
    n: int


@dataclass(frozen=True)
class Story:
    family: str
    policy: str
    context: int
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]


_groups = st.builds(
    Group,
    kind=st.sampled_from(tuple(KINDS)),
    size=st.sampled_from((1, 2, 3)),
    private=st.booleans(),
    names=st.integers(0, len(NAMES) - 1),
    echo=st.integers(0, len(ECHOES) - 1),
    thinking=st.sampled_from((True, True, False)),
)
_steps = st.builds(Step, which=st.integers(-3, 5), event=st.integers(0, len(EVENTS) - 1), n=st.integers(0, 23))
stories = st.builds(
    Story,
    family=st.sampled_from(("qwen35", "chatml")),
    policy=st.sampled_from(("append", "append", "append", "append", "strict")),
    context=st.sampled_from((0, 0, 1500, 4000)),
    groups=st.lists(_groups, min_size=1, max_size=3).map(tuple),
    # Short lists are what hypothesis draws if it may; it makes a failing one short by steps that do nothing.
    steps=st.lists(_steps, min_size=30, max_size=40).map(lambda steps: tuple(filter(lambda step: step.event, steps))),
)
