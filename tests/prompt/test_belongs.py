"""A prompt belongs to one conversation: many of them at one server, alike in their words, and none sees another's.

`belongs_checks` has the properties, `belongs_events` what may happen. ``python -m pytest tests/prompt/test_belongs.py
--slow`` looks at 100,000 requests.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.prompt.belongs_reference import DEFECTS, AsSent, Noting
from tests.prompt.belongs_story import Story, stories
from tests.prompt.belongs_world import Broken, Start, real, tell

# A story has about thirty requests.
FEW, MANY = 90, 3600
IN_ONE_TEST = 120
SHRINKING = (Phase.generate, Phase.shrink)


def look(start: Start, examples: int, number: int | None = None, phases: tuple[Phase, ...] = SHRINKING) -> Counter[str]:
    """Tells that many stories; what happened in them. The same ones every time, or those of a seed."""
    figures: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=number is None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(stories)
    def stories_end_well(story: Story) -> None:
        tell(story, start, figures)

    (seed(number)(stories_end_well) if number is not None else stories_end_well)()
    return figures


def test_a_prompt_belongs_to_one_conversation() -> None:
    figures = look(real, FEW)
    assert figures["requests"] >= 2000
    # Prompts of a server that reuses nothing have all the properties too.
    assert figures["notes"] >= 50
    assert figures["thoughts given back"] >= 100


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(MANY // IN_ONE_TEST))
def test_a_prompt_belongs_to_one_conversation_in_many_stories(number: int) -> None:
    assert look(real, IN_ONE_TEST, number)["requests"] >= 100_000 * IN_ONE_TEST / MANY


# --- the properties themselves -----------------------------------------------------------


@pytest.mark.parametrize("server", [AsSent, Noting])
def test_an_honest_server_has_all_the_properties(server: type[AsSent]) -> None:
    figures = look(server, 20)
    assert figures["requests"] >= 400
    assert server is AsSent or figures["notes"] >= 10


@pytest.mark.parametrize("server", DEFECTS)
def test_a_defect_is_found(server: type[AsSent]) -> None:
    with pytest.raises(Broken):
        look(server, FEW, phases=(Phase.generate,))
