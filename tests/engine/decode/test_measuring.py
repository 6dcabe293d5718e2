"""What passes cost, measured on a model whose clock is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from start_llm.engine.decode.costs import WIDTHS, PassCosts
from start_llm.engine.decode.draft import Acceptance
from start_llm.engine.decode.drafting import LONG, SHORT, measuring
from start_llm.engine.decode.gate import DraftGate
from start_llm.models.background import at_once
from tests.engine.zoo import CONFIGS, make


class Machine:
    """A model with one layer; a pass takes what `cost` says of its width and its context."""

    def __init__(self, cost: Callable[[int, int], float], layers: Sequence[Any] = (KVCache,)) -> None:
        self.now, self._cost, self._layers = 0.0, cost, layers

    def make_cache(self) -> list[Any]:
        return [layer() for layer in self._layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        width = tokens.shape[1]
        self.now += self._cost(width, cache[0].offset)
        for layer in cache:
            layer.update_and_fetch(mx.zeros((1, 1, width, 8)), mx.zeros((1, 1, width, 8)))
        return mx.zeros((1, width, 4))

    def clock(self) -> float:
        return self.now


def measured(machine: Machine) -> list[tuple[int, int, float]]:
    found: list[tuple[int, int, float]] = []
    at_once(measuring(machine, machine.make_cache, lambda *seen: found.append(seen), clock=machine.clock))
    return found


def gate(found: list[tuple[int, int, float]]) -> DraftGate:
    costs = PassCosts()
    for one in found:
        costs.observe(*one)
    made = DraftGate(costs)
    made.observe(1, SHORT, costs.seconds(1, SHORT))  # as the first pass of an answer
    return made


def test_all_widths_are_measured_at_two_lengths() -> None:
    machine = Machine(lambda width, held: 0.001 + 0.0001 * width + 1e-7 * held)
    found = measured(machine)
    for length in (SHORT, LONG):
        row = {width: seconds for width, context, seconds in found if context == length}
        assert row == {width: pytest.approx(0.001 + 0.0001 * width + 1e-7 * length) for width in WIDTHS}
    assert machine.now < 2


def test_a_slow_machine_is_not_kept_busy_and_tries_before_it_says_no() -> None:
    machine = Machine(lambda width, held: 0.4 * width)
    one = gate(measured(machine))
    assert machine.now < 0.4 * (2 * SHORT + 6)
    lengths = []
    for _ in range(200):
        length = one.length(Acceptance(), 32, 31, carried=0, context=100)
        one.observe(1 + length, 100, 0.4 * (1 + length))
        lengths.append(length)
    assert sum(length > 0 for length in lengths) <= 4


def test_a_machine_that_is_slow_and_wide_knows_what_wide_passes_cost() -> None:
    """A large model: nothing is measured twice, and what is known lies far apart."""
    machine = Machine(lambda width, held: 0.14 * (1 + 0.1 * (width - 1)))
    found = measured(machine)
    warming = 0.14 * (1 + SHORT // 16 * (1 + 0.1 * 15))
    assert machine.now - warming < 2
    assert {1, 8, 32} <= {width for width, context, _ in found if context == SHORT}
    assert gate(found).length(Acceptance(), 32, 31, carried=0, context=100) > 20


def test_a_model_that_takes_a_second_a_pass_drafts_from_the_first_answer_on() -> None:
    """There is time for one width only; what the warm-up took says what a wide pass takes."""
    machine = Machine(lambda width, held: 1.1 * (1 + 0.02 * width))
    assert gate(measured(machine)).length(Acceptance(), 32, 31, carried=0, context=2000) >= 15


def test_a_window_alone_is_measured_once() -> None:
    machine = Machine(lambda width, held: 0.001, [lambda: RotatingKVCache(32)])
    assert {context for width, context, _ in measured(machine) if width != 16} == {SHORT}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_architecture_can_be_measured(name: str) -> None:
    model = make(name)
    found: list[tuple[int, int, float]] = []
    at_once(measuring(model, lambda: make_prompt_cache(model), lambda *seen: found.append(seen), seconds=0.05))
    assert all(seconds > 0 for _, _, seconds in found)
    assert {1} <= {width for width, context, _ in found if context == SHORT}
