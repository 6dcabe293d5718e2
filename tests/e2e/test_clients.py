"""Real agents against the real server: they read, edit and run, over turns, resumed sessions and sub-agents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from start_llm.clients import CLIENTS
from tests.e2e.counting import NewTokens, is_opening
from tests.e2e.scenarios import NOTES, SCENARIOS, Scenario
from tests.e2e.world import Run, World, skip_unless_installed
from tests.kinds import RUN
from tests.oracle.oracle import script

MOST_COMPUTED = 1.2
"""Tokens computed by new tokens, of every turn after the first."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
SUB_AGENT_REQUESTS = 2  # it reads a file and answers
REPAIR, WRITE_DOWN = "Repair add in src/calc.py and try it.", "Write it down in NOTES.md."
DEFINES = "What does src/util.py define?"


@pytest.fixture(scope="module")
def counter() -> NewTokens:
    return NewTokens.of_the_oracle()


def check(run: Run, expected: int) -> None:
    """The agent ended well, and so did every request, of which there were at least `expected`."""
    assert run.code == 0, f"exit code {run.code} (None: out of time)\n{run.output[-3000:]}"
    failed = [(entry["path"], entry["status"]) for entry in run.sent if entry["status"] != 200]
    assert failed == [], run.output[-2000:]
    assert [entry["id"] for entry in run.served if entry["status"] != 200] == []
    assert len(run.served) >= expected, run.output[-3000:]


@dataclass(frozen=True)
class Figures:
    """(computed, new) tokens of a run: of requests that go on with a conversation, and of those that open one."""

    going_on: tuple[int, int]
    opening: tuple[int, int]


def measure(run: Run, counter: NewTokens) -> Figures:
    """Counted in the order of the requests' ends, which both records have."""
    asked = [entry for entry in run.sent if "count_tokens" not in entry["path"]]
    sums = {True: [0, 0], False: [0, 0]}
    for sent, served in zip(asked, run.served, strict=True):
        part = sums[is_opening(sent["body"])]
        part[0] += served["computed"]
        part[1] += counter.count(sent["body"])
    return Figures((sums[False][0], sums[False][1]), (sums[True][0], sums[True][1]))


class Session:
    """One agent in its repository; every turn's figures are kept."""

    def __init__(self, world: World, scenario: Scenario, counter: NewTokens) -> None:
        self.world, self.scenario, self.counter = world, scenario, counter
        self.repository = world.repository(scenario.name)
        self.data = world.folder / scenario.name / "cache" / "launch" / scenario.name
        self.figures: dict[str, Figures] = {}
        self.reused = ""

    def turn(self, turn: str, ask: str, texts: list[str], how: Callable[[str, Path], tuple[list[str], str]]) -> Run:
        arguments, text = how(self.prompt(ask, texts), self.data)
        requests, scenario = len(texts), self.scenario
        if turn == "resumed" and scenario.sub_agent:
            requests += SUB_AGENT_REQUESTS + scenario.told
        typed = requests if scenario.typed and turn in {"second", "resumed"} else None
        late = requests if scenario.beside else 0
        run = self.world.launch(scenario.name, self.repository, arguments, text, scenario.seconds, typed, late)
        check(run, len(texts))
        assert not scenario.unsaid or scenario.unsaid not in run.output
        counter = self.counter
        if turn == "fresh":
            # It repeats what another one has seen: what it is told there is new here.
            counter = NewTokens(counter.tokens)
        self.figures[turn] = measure(run, counter)
        return run

    def live(self) -> Run:
        """Types the prompts of three turns into one process; a request belongs to the last of them that it tells."""
        repo, scenario = self.repository, self.scenario
        turns = {
            "first": (REPAIR, scenario.work(repo)),
            "second": (WRITE_DOWN, scenario.note(repo)),
            "third": (DEFINES, scenario.more(repo)),
        }
        arguments, _ = self.scenario.first("", self.data)
        text = "".join(self.scenario.first(self.prompt(*turn), self.data)[1] for turn in turns.values())
        run = self.world.launch(self.scenario.name, self.repository, arguments, text, self.scenario.seconds)
        check(run, sum(len(texts) for _, texts in turns.values()))
        names = [[name for name, (ask, _) in turns.items() if ask in str(entry["body"])][-1] for entry in run.sent]
        for turn in turns:
            sent, served = (
                [entry for entry, name in zip(entries, names, strict=True) if name == turn]
                for entries in (run.sent, run.served)
            )
            self.figures[turn] = measure(replace(run, sent=sent, served=served), self.counter)
        return run

    def prompt(self, ask: str, texts: list[str]) -> str:
        return f"{ask} {script(*texts)}"

    def line(self) -> str:
        cells = []
        for turn, figures in self.figures.items():
            (computed, new), (opened, _) = figures.going_on, figures.opening
            cells.append(f"{turn} {computed}/{new}" + (f" (opening {opened})" if opened else ""))
        return f"{self.scenario.name:10}" + "".join(f"{cell:>34}" for cell in cells) + self.reused


@pytest.mark.parametrize("name", [pytest.param("pi", marks=pytest.mark.smoke), *sorted(CLIENTS.keys() - {"pi"})])
def test_agent(name: str, world: World, counter: NewTokens, table: list[str], request: pytest.FixtureRequest) -> None:
    skip_unless_installed(name)
    scenario = SCENARIOS[name]
    session = Session(world, scenario, counter)
    repo = session.repository
    whole = RUN.whole or request.config.getoption("--e2e")  # two turns show the same of every day's run
    beside = world.beside(name, repo, *scenario.beside) if scenario.beside else nullcontext()
    try:
        with beside:
            if scenario.live:
                live_turns(session, repo)
            else:
                first_turn(session, repo)
                second_turn(session, repo)
                if whole:
                    resumed_turn(session, repo)
            if whole:
                fresh_session(session, repo)
    finally:
        table.append(session.line())
    later = {turn: figures.going_on for turn, figures in session.figures.items() if turn != "first"}
    over = {turn: computed for turn, most in scenario.most.items() if (computed := later.pop(turn)[0]) > most}
    ratios = {turn: computed / max(1, new) for turn, (computed, new) in later.items()}
    assert over | {turn: ratio for turn, ratio in ratios.items() if ratio > MOST_COMPUTED} == {}


def live_turns(session: Session, repo: Path) -> None:
    session.live()
    assert (repo / "src" / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert (repo / "NOTES.md").read_text().strip() == NOTES.strip()
    session.turn("resumed", "What does add do?", session.scenario.look(repo), session.scenario.again)


def first_turn(session: Session, repo: Path) -> None:
    session.turn("first", REPAIR, session.scenario.work(repo), session.scenario.first)
    assert (repo / "src" / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert (repo / "out.txt").read_text() == "3\n"


def second_turn(session: Session, repo: Path) -> None:
    session.turn("second", WRITE_DOWN, session.scenario.note(repo), session.scenario.again)
    assert (repo / "NOTES.md").read_text().strip() == NOTES.strip()
    assert (repo / "status.txt").exists()


def resumed_turn(session: Session, repo: Path) -> None:
    texts = session.scenario.more(repo)
    run = session.turn("resumed", DEFINES, texts, session.scenario.again)
    if session.scenario.sub_agent:
        expected = len(texts) + SUB_AGENT_REQUESTS + session.scenario.told
        assert len(run.served) >= expected, f"no sub-agent ran\n{run.output[-2000:]}"


def fresh_session(session: Session, repo: Path) -> None:
    scenario = session.scenario
    run = session.turn("fresh", "Does add add?", scenario.look(repo), scenario.fresh or scenario.first)
    opening = next(entry for entry in run.served if entry["tools"] or scenario.name == "aider")
    session.reused = f"  {opening['reused'] / opening['prompt']:.1%} of the fresh session's first prompt reused"
    assert opening["reused"] >= scenario.fresh_reuse * opening["prompt"], opening
