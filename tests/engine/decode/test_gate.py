"""What a draft of a certain length is expected to yield, and how a gate that says no comes to say yes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from scripts.bench.drafting import Published, cost_at
from start_llm.engine.decode.draft import HEAD_MATCH, LEAST_MATCH
from start_llm.engine.decode.gate import MOST_WIDE, WIDTHS, DraftGate, DraftOption, PassCosts
from tests.kinds import some

FLAT = {1: 1.0, 32: 1.0}
STEEP = {1: 1.0, 32: 32.0}
M4_PRO = {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5}
M1_LIKE = {1: 1.0, 2: 1.83, 4: 3.26, 8: 6.1, 32: 6.4}


def gate(costs: dict[int, float], carries: bool = False) -> DraftGate:
    """One that has tried enough for now."""
    made = DraftGate(Published(costs), carries)
    made._seconds_tried = 1.0
    return made


def ask(gate: DraftGate, match: int, most: int = 31, carried: int = 0, context: int = 100) -> int:
    return gate.choose([DraftOption(match, most)], carried=carried, context=context)[1]


@pytest.mark.parametrize(
    ("costs", "lengths"),
    [
        (FLAT, {16: 31}),
        (STEEP, {3: 0, 8: 0, 32: 0}),
        (M4_PRO, {3: 2, 32: 31}),
        (M1_LIKE, {3: 0, 4: 0, 32: 31}),
    ],
    ids=["width costs nothing", "it costs in proportion", "M4 Pro", "M1"],
)
def test_the_length_follows_the_machine_and_the_match(costs: dict[int, float], lengths: dict[int, int]) -> None:
    assert {match: ask(gate(costs), match) for match in lengths} == lengths
    assert ask(gate(FLAT), 32, most=4) == 4, "no more than is proposed"


def test_a_model_that_must_carry_drafts_less() -> None:
    cut, carries = gate(M4_PRO), gate(M4_PRO, carries=True)
    assert all(ask(carries, match) <= ask(cut, match) for match in (3, 8, 32))
    halves = {1: 1.0, 2: 1.2, 32: 7.0}
    assert ask(gate(halves, carries=True), 8) < ask(gate(halves), 8)


def test_proposals_that_keep_failing_are_not_drafted_until_they_are_right_again() -> None:
    one = gate(M4_PRO)
    for _ in range(60):
        one.acceptance.observe(3, False)
    assert ask(one, 3) == 0 and not one.hopeful(3, context=0)
    assert one.hopeful(32, context=0)
    for _ in range(60):
        one.acceptance.observe(3, True)
    assert ask(one, 3) > 0


def test_the_loop_waits_only_where_a_draft_is_likely_to_be_worth_the_launch_of_a_pass() -> None:
    one = gate(FLAT)
    assert one.hopeful(LEAST_MATCH, context=100) and not one.hopeful(LEAST_MATCH - 1, context=100)
    for _ in range(60):
        one.acceptance.observe(LEAST_MATCH - 1, False)
    assert not one.hopeful(LEAST_MATCH, context=100)
    assert one.hopeful(32, context=100), "a match that is there already goes on"


def test_of_a_copy_and_a_head_the_one_is_taken_that_gains_more() -> None:
    one = gate(FLAT)
    one.head = 0.01
    options = [DraftOption(32, 8), DraftOption(HEAD_MATCH, 8)]
    assert one.choose(options, carried=0, context=100) == (0, 8)
    for _ in range(60):
        one.acceptance.observe(32, False)
    assert one.choose(options, carried=0, context=100)[0] == 1


def test_a_pass_over_blocks_of_several_rows_is_as_wide_as_all_of_them_gain() -> None:
    copies, nothing = DraftOption(32, 31), DraftOption(0, 0)

    def width(costs: dict[int, float], *options: DraftOption) -> int:
        return gate(costs).together(options, context=100)

    assert (width(FLAT, copies, copies), width(FLAT, copies, copies, copies, copies)) == (32, 16)
    assert width(FLAT, nothing, nothing) == 1 == width({1: 1.0, 64: 64.0}, copies, copies)
    assert width(FLAT, copies, nothing, nothing) == 21, "what one row copies is worth a pass of all"
    assert width(FLAT, DraftOption(32, 4), DraftOption(2, 31)) == 5, "a match that is too short is nothing"


Slowness = Callable[[int], float]  # of the machine, by the number of the pass


class Machine:
    """A gate in use: it is asked before each pass, and told what the pass took, by a clock."""

    def __init__(
        self, gate: DraftGate, truth: Callable[[int, int], float], context: int, clock: Slowness = lambda _: 1.0
    ) -> None:
        self.gate, self._truth, self._context, self._clock = gate, truth, context, clock
        self.seconds = self.wide = 0.0

    def decode(self, passes: int, match: int = 32, learns: bool = False) -> list[int]:
        """Lengths of the drafts, all of which are right. `learns`: the gate is told so."""
        lengths = []
        for number in range(passes):
            length = ask(self.gate, match, context=self._context)
            took = self._truth(1 + length, self._context)
            self.gate.observe(1 + length, self._context, took * self._clock(number))
            for i in range(length if learns else 0):
                self.gate.acceptance.observe(match + i, True)
            self.seconds += took
            self.wide += took if length else 0.0
            lengths.append(length)
        return lengths


def cheap(width: int, context: int) -> float:
    return 0.01 * (1 + width / 100) + 2e-7 * context


def dear(width: int, context: int) -> float:
    return 0.01 * width


@pytest.mark.parametrize("measured", some([0.001, 0.1, 20.0, 1.0], 2))
@pytest.mark.parametrize("steep", some([32.0, 1.0]))
@pytest.mark.parametrize("context", some([200_000, 31_611, 500]))
def test_a_gate_recovers_from_any_start(measured: float, steep: float, context: int) -> None:
    """Whatever was measured: as much too quick or slow, and as much in favour of narrow passes."""
    costs = PassCosts()
    for length in (64, 4096):
        for width in (1, 2, 4, 8, 16, 32):
            costs.observe(width, length, 0.01 * measured * (1 + (width - 1) * (steep - 1) / 31))
    machine = Machine(DraftGate(costs), cheap, context)
    machine.decode(1500)
    assert sorted(machine.decode(50))[1] > 20, "all but one, which tells what a narrow pass takes"


def test_a_gate_that_knows_nothing_drafts_at_once() -> None:
    """A slow model drafts from its first answer on."""
    machine = Machine(DraftGate(PassCosts()), lambda width, context: 1.1 * (1 + 0.05 * width), 2000)
    assert machine.decode(1) == [0], "what is it compared with?"
    assert machine.decode(1)[0] >= 15
    assert sum(machine.decode(100)) > 1500


def test_a_narrow_pass_whose_time_nobody_knows_does_not_close_the_gate() -> None:
    """Other models compute between the passes of this one, so none of them is timed."""
    one = DraftGate(PassCosts())
    assert [ask(one, 32) > 0 for _ in range(4)] == [False, True, True, True]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_where_nothing_pays_tries_take_under_a_hundredth_of_the_time(seed: int) -> None:
    noise = random.Random(seed)
    machine = Machine(DraftGate(PassCosts()), lambda width, context: dear(width, context) * noise.uniform(0.8, 1.3), 0)
    for number in range(200):  # half of the proposals are right
        for match in range(3, 64):
            machine.gate.acceptance.observe(match, number % 2 == 0)
    machine.decode(500)  # it learns
    machine.seconds = machine.wide = 0.0
    lengths = machine.decode(30_000)
    assert 0 < machine.wide < 0.01 * machine.seconds
    assert sum(length > 0 for length in lengths) > 5


def noisy(chance: random.Random) -> Slowness:
    return lambda _: max(0.5, chance.gauss(1, 0.1))


def bursty(chance: random.Random) -> Slowness:
    """Somebody else computes for some passes, every now and then."""
    busy = {at + i: chance.uniform(2, 6) for at in chance.sample(range(4000), 80) for i in range(chance.randint(1, 8))}
    usual = noisy(chance)
    return lambda number: usual(number) * busy.get(number, 1.0)


def power_mode(chance: random.Random) -> Slowness:
    usual = noisy(chance)
    return lambda number: usual(number) * (3.0 if 200 <= number < 700 else 1.0)


def wrong(chance: random.Random) -> Slowness:
    usual = noisy(chance)
    return lambda number: usual(number) if chance.random() < 0.95 else 10 ** chance.uniform(-4, 4)


def m4_pro(width: int, context: int) -> float:
    return 0.01 * cost_at(M4_PRO, width) + 1e-8 * context


CONTEXT = 41_000


def speeds(
    clock: Callable[[random.Random], Slowness], before: str, truth: Callable[[int, int], float], seed: int
) -> tuple[float, float]:
    """Tokens a second of a gate that learns by this clock, and of one that knows what passes cost."""
    costs, chance = PassCosts(), random.Random(seed)
    if before != "nothing":
        for length, width in product((64, 4096), WIDTHS):
            costs.observe(width, length, truth(width, length) * (20.0 if before == "busy" else 1.0) * noisy(chance)(0))
    machine = Machine(DraftGate(costs), truth, CONTEXT, clock(chance))
    said = sum(machine.decode(1000, 16, learns=True)) + 1000
    knows = gate({width: truth(width, CONTEXT) for width in range(1, MOST_WIDE + 1)})
    best = Machine(knows, truth, CONTEXT)
    return said / machine.seconds, (sum(best.decode(1000, 16, learns=True)) + 1000) / best.seconds


@pytest.mark.parametrize("clock", some([bursty, noisy, power_mode, wrong], 2))
@pytest.mark.parametrize("before", some(["nothing", "quiet", "busy"]))
@pytest.mark.parametrize("truth", some([m4_pro, cheap, dear]))
@pytest.mark.parametrize("seed", some([1, 2, 3, 4]))
def test_whatever_a_clock_says_it_is_about_as_fast_as_a_gate_that_knows(
    clock: Callable[[random.Random], Slowness], before: str, truth: Callable[[int, int], float], seed: int
) -> None:
    speed, best = speeds(clock, before, truth, seed)
    assert speed > 0.87 * best
    assert speed > 0.94 / truth(1, CONTEXT), "what it costs to learn that wide passes do not pay"
