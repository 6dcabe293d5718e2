"""A prompt belongs to one conversation: many of them at one server, alike in their words, and none sees another's.

`belongs_checks` has the properties, `belongs_events` what may happen. ``python -m pytest tests/prompt/test_belongs.py
--slow`` looks at 100,000 requests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.kinds import rounds
from tests.prompt.belongs_clients import KINDS, SYSTEM, Place
from tests.prompt.belongs_events import EVENTS
from tests.prompt.belongs_story import ECHOES, Group, Step, Story, stories
from tests.prompt.belongs_world import Broken, Spoil, tell

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
    look(lambda story: tell(story, figures), few)
    assert figures["requests"] >= 40 * few
    # A server that reuses nothing has all the properties too.
    assert figures["notes"] >= few
    assert figures["thoughts given back"] >= few


@pytest.mark.parametrize("number", range(1, len(EVENTS)), ids=[name.replace(" ", "-") for name, _ in EVENTS[1:]])
@pytest.mark.thorough
def test_each_event_alone(number: int) -> None:
    """Two conversations, alike, the event between turns that tell what it left; and one that none is alike."""
    told = [(next(iter(KINDS)), 1), *((kind, 2) for kind in KINDS)]
    for n, (kind, size) in enumerate(told):
        group = Group(kind, size, True, 0, n % len(ECHOES), True)
        steps = [Step(-1, ONE_TURN, 2), Step(-1, ONE_TURN, 0)]  # a long answer, which is a proof, and a call
        steps += [Step(0, number, n), Step(-1, ONE_TURN, 2), Step(1, number, n + 5)]
        tell(Story("qwen35", "append", 0, (group,), (*steps, Step(-1, ONE_TURN, 1))))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MANY // IN_ONE_TEST))
def test_a_prompt_belongs_to_one_conversation_in_many_stories(number: int) -> None:
    figures: Counter[str] = Counter()
    look(lambda story: tell(story, figures), IN_ONE_TEST, number)
    assert figures["requests"] >= 100_000 * IN_ONE_TEST / MANY


# --- the properties themselves -----------------------------------------------------------

END = "<|im_end|>"


def without_notes(sent: object, text: str) -> str:
    return re.sub(r"(?s)<update-.*?</update>", "", text)


class Defect(NamedTuple):
    """A defect of a prompt, what is said of it, and what must happen for it to show soon."""

    words: str
    spoil: Spoil
    events: tuple[str, ...] = ("go on",)
    policy: str = "append"


DEFECTS = {
    "another one's word": Defect(
        "(a) 'qzzz999' is not of this conversation", lambda _, text: text.replace(END, f" qzzz999{END}", 1)
    ),
    "a value left out": Defect("is not in the prompt", lambda _, text: re.sub("(?<=Mode: )mode-[-a-z0-9]+", "", text)),
    "an old value last": Defect(
        "but the last that is said is",
        lambda sent, text: "\nMode: ".join([text, *sent.earlier.get(Place(SYSTEM, "mode"), ())[:1]]),
        ("line changes",),
    ),
    "a change untold": Defect("is not in the prompt", without_notes, ("go on", "line changes")),
    "a withdrawal untold": Defect(
        "was withdrawn, nothing says so", without_notes, ("go on", "message changes", "many lines")
    ),
    "tools' withdrawal untold": Defect("was withdrawn, nothing says so", without_notes, ("go on", "side role")),
    "a message left out": Defect(
        "(b) the messages are",
        lambda _, text: re.sub(r"(?s)<\|im_start\|>user\n(?!<tool_response>).*?<\|im_end\|>\n", "", text, count=1),
    ),
    "an answer changed": Defect("assistant's: 'OK.'", lambda _, text: text.replace(f"OK.{END}", f"No.{END}")),
    "a line left out of a question": Defect(
        "a user's: 'x-anthropic", lambda _, text: re.sub("x-anthropic-billing-header: .*\n", "", text)
    ),
    "a call changed": Defect(
        "a assistant's", lambda _, text: re.sub(r', "dry_run": [^,}]+', "", text), ("go on", "default comes")
    ),
    "far too long": Defect("are allowed", lambda _, text: text + " word" * len(text)),
    "a word more": Defect("(e) not what was sent", lambda _, text: text.replace("Be brief.", "Be so brief.")),
    "a word more, strict": Defect(
        "(e) not what was sent", lambda _, text: text.replace("Be brief.", "Be so brief."), policy="strict"
    ),
    "a guess told more": Defect(
        "(f) a guess is told",
        lambda sent, text: text + "." * str(sent.request.owner).startswith("guesser"),
        ("go on", "guessed"),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
@pytest.mark.thorough
def test_a_defect_is_found(defect: Defect) -> None:
    names = [name for name, _ in EVENTS]
    chosen = [names.index(name) for name in defect.events]

    def tell_one(story: Story) -> None:
        steps = tuple(replace(step, event=chosen[step.event % len(chosen)]) for step in story.steps)
        try:
            tell(replace(story, policy=defect.policy, steps=steps), spoil=defect.spoil)
        except Broken as broken:
            if defect.words in str(broken):
                raise

    with pytest.raises(Broken):
        look(tell_one, FOR_A_DEFECT, shrink=False)
