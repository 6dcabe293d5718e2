"""A prompt belongs to one conversation: many of them at one server, alike in their words, and none sees another's.

`belongs_checks` has the properties, `belongs_events` what may happen. ``python -m pytest tests/prompt/test_belongs.py
--slow`` looks at 100,000 requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.kinds import rounds
from tests.memory_folder import memory_folder
from tests.prompt.belongs_checks import seen
from tests.prompt.belongs_clients import KINDS
from tests.prompt.belongs_conversation import Words, imported
from tests.prompt.belongs_events import EVENTS
from tests.prompt.belongs_reference import DEFECTS, AsSent, Noting
from tests.prompt.belongs_roles import ROLE_DEFECTS
from tests.prompt.belongs_story import ECHOES, Group, Step, Story, stories
from tests.prompt.belongs_world import Broken, World, real, tell
from tests.prompt.client import stripped

# A story has about forty requests.
FEW, FOR_A_DEFECT, MANY, IN_ONE_TEST = 12, 46, 2600, 104
ONE_TURN = [name for name, _ in EVENTS].index("go on")

pytestmark = pytest.mark.timeout(900)


def look(tell_one: Callable[[Story], None], examples: int, number: int | None = None, shrink: bool = True) -> None:
    """Tells that many stories: the same ones every time, or those of a seed."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=number is None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(stories)
    def stories_end_well(story: Story) -> None:
        tell_one(story)

    (seed(number)(stories_end_well) if number is not None else stories_end_well)()


def test_a_prompt_belongs_to_one_conversation() -> None:
    figures: Counter[str] = Counter()
    few = rounds(FEW, 4)
    look(lambda story: tell(story, real, figures), few)
    assert figures["requests"] >= 40 * few
    # A server that reuses nothing has all the properties too.
    assert figures["notes"] >= few
    assert figures["thoughts given back"] >= few


@pytest.mark.parametrize("number", range(1, len(EVENTS)), ids=[name.replace(" ", "-") for name, _ in EVENTS[1:]])
@pytest.mark.thorough
def test_each_event_alone(number: int) -> None:
    """Two conversations, alike, the event between turns that tell what it left."""
    for n, kind in enumerate(KINDS):
        told = Group(kind, 2, True, 0, n % len(ECHOES), True)
        steps = [Step(-1, ONE_TURN, 0), Step(0, number, n), Step(-1, ONE_TURN, 2), Step(1, number, n + 5)]
        tell(Story("qwen35", "append", 0, (told,), (*steps, Step(-1, ONE_TURN, 1))), real)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MANY // IN_ONE_TEST))
def test_a_prompt_belongs_to_one_conversation_in_many_stories(number: int) -> None:
    figures: Counter[str] = Counter()
    look(lambda story: tell(story, real, figures), IN_ONE_TEST, number)
    assert figures["requests"] >= 100_000 * IN_ONE_TEST / MANY


@pytest.mark.parametrize(
    "first",
    [
        [("go on", 0), ("undo", 0)],
        [("go on", 0), ("go on", 0), ("undo", 0)],
        [("go on", 1), ("go on", 0)],
    ],
)
def test_a_call_that_is_changed_and_changed_back_is_the_one_that_was_made(first: list[tuple[str, int]]) -> None:
    """Also where another answer has the same words and calls: the request carries the id of one."""
    names = [name for name, _ in EVENTS]
    happened = [*first, ("default comes", 0), ("default comes", 0)]
    group = Group("unknown", 1, False, 0, ECHOES.index(stripped), True)
    tell(Story("qwen35", "append", 0, (group,), tuple(Step(0, names.index(name), n) for name, n in happened)), real)


@pytest.mark.parametrize("block", [False, True])
def test_who_sends_the_same_words_cannot_be_told_apart(block: bool) -> None:
    """Also where one of the messages is a declared block only."""
    story = Story("qwen35", "append", 0, (Group("claude", 1, False, 0, ECHOES.index(stripped), True),), ())
    with memory_folder() as folder:
        world = World(story, real, folder)
        (conversation,) = world.conversations
        world.turn(conversation, 1)
        if block:
            conversation.say_block(2)
        world.turn(conversation, 1)
        twin = imported(conversation, Words(world.tag()), same_values=True, ours=True)
        twin.say(1)
        assert seen(world.truth, twin.sent(), "", 0, True).alike is world.truth.made[-1]
        world.server.close()


# --- the properties themselves -----------------------------------------------------------


@pytest.mark.parametrize("server", [AsSent, Noting])
@pytest.mark.thorough
def test_an_honest_server_has_all_the_properties(server: type[AsSent]) -> None:
    figures: Counter[str] = Counter()
    look(lambda story: tell(story, server, figures), 6, shrink=False)
    assert figures["requests"] >= 150
    assert server is AsSent or figures["notes"] >= 5


@pytest.mark.parametrize(("server", "letter"), (DEFECTS | ROLE_DEFECTS).items())
@pytest.mark.thorough
def test_a_defect_is_found(server: type[AsSent], letter: str) -> None:
    names = [name for name, _ in EVENTS]
    chosen = [names.index(name) for name in server.events]

    def tell_one(story: Story) -> None:
        groups = tuple(replace(group, **server.groups) for group in story.groups)
        steps = tuple(replace(step, event=chosen[step.event % len(chosen)]) for step in story.steps)
        try:
            tell(replace(story, policy=server.policy, groups=groups, steps=steps), server)
        except Broken as broken:
            if f"\n({letter})" in f"\n{broken}":
                raise

    with pytest.raises(Broken):
        look(tell_one, FOR_A_DEFECT, shrink=False)
