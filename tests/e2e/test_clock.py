"""aider and Cline with a file of rules whose clock and mode lines change between the turns of one session.

Both have no field that tells a clock: the lines stand in the text that they send.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.counting import NewTokens
from tests.e2e.scenarios import AIDER, CLINE, TRY, Scenario, typed
from tests.e2e.test_clients import MOST_COMPUTED, Session, first_turn, resumed_turn, second_turn
from tests.e2e.world import World, make_world, skip_unless_installed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
RULES = "# House rules\n\nKeep functions short.\n\nCurrent time: 2026-11-22 10:0{turn}:17\nMode: {mode}\n"


def rules(turn: int) -> str:
    return RULES.format(turn=turn, mode="PLAN" if turn == 2 else "ACT")


@pytest.fixture(scope="module")
def clocked(tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path) -> Iterator[World]:
    """A world of its own: the agents' folders go by their names."""
    with make_world(tmp_path_factory.mktemp("clocked"), oracle_folder) as made:
        yield made


def started(scenario: Scenario, world: World) -> Session:
    skip_unless_installed(scenario.name)
    return Session(world, scenario, NewTokens.of_the_oracle())


def clocks(session: Session) -> list[str]:
    """The minutes that the agent sent, in the order of their first requests."""
    found = [minute for entry in session.world.sent() for minute in re.findall(r"10:0(\d):17", str(entry["body"]))]
    return list(dict.fromkeys(found))


def test_cline_with_a_clock_in_its_rules(clocked: World, table: list[str]) -> None:
    session = started(CLINE, clocked)
    path = session.repository / ".clinerules" / "clock.md"
    path.parent.mkdir()
    turns: list[Callable[[Session, Path], None]] = [first_turn, second_turn, resumed_turn]
    try:
        for number, turn in enumerate(turns, 1):
            path.write_text(rules(number))
            turn(session, session.repository)
    finally:
        table.append(f"clock {session.line()}")
    assert clocks(session) == ["1", "2", "3"]
    ratios = {turn: figures.going_on for turn, figures in session.figures.items() if turn != "first"}
    assert {turn: pair for turn, pair in ratios.items() if pair[0] > MOST_COMPUTED * pair[1]} == {}


def test_aider_with_a_clock_in_a_file_that_it_reads(clocked: World, table: list[str]) -> None:
    """Its test command writes the next minute."""
    write = "; ".join(
        (
            "turn=$(($(cat .turn 2>/dev/null || echo 1) + 1))",
            "echo $turn > .turn",
            'mode=ACT; if [ "$turn" = 2 ]; then mode=PLAN; fi',
            f'printf "{rules(1)}" | sed "s/10:01/10:0$turn/; s/ACT/$mode/" > CLOCK.md'.replace("\n", "\\n"),
        )
    )
    first, _ = AIDER.first("", Path())
    arguments = [f"{word}; {write}" if word.startswith(TRY) else word for word in first]
    arguments = [*arguments, "--read", "CLOCK.md"]
    session = started(replace(AIDER, first=lambda prompt, data: (arguments, typed(prompt)), seconds=400), clocked)
    (session.repository / "CLOCK.md").write_text(rules(1))
    try:
        session.live()
    finally:
        table.append(f"clock {session.line()}")
    assert clocks(session) == ["1", "2", "3"]
    assert session.figures["second"].going_on[0] <= 260 and session.figures["third"].going_on[0] <= 430
