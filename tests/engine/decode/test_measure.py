"""What passes cost, measured on a model whose clock is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from start_llm.engine.decode.costs import WIDTHS, Acceptance, CostTable, DraftGate
from start_llm.engine.decode.measure import LONG, SHORT, measure_passes
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


def test_all_widths_are_measured_at_two_lengths() -> None:
    machine = Machine(lambda width, held: 0.001 + 0.0001 * width + 1e-7 * held)
    measured = measure_passes(machine, machine.make_cache, clock=machine.clock)
    assert list(measured) == [SHORT, LONG]
    for length, row in measured.items():
        assert row == {width: pytest.approx(0.001 + 0.0001 * width + 1e-7 * length) for width in WIDTHS}
    assert machine.now < 2


def test_a_slow_machine_is_not_kept_busy_and_never_drafts() -> None:
    machine = Machine(lambda width, held: 0.4 * width)
    measured = measure_passes(machine, machine.make_cache, clock=machine.clock)
    assert machine.now < 0.4 * (2 * SHORT + 6)
    gate = DraftGate(CostTable(measured), Acceptance())
    assert all(gate.length(match, 31, carried=0, context=100) == 0 for match in (3, 12, 32))


def test_a_machine_that_is_slow_and_wide_knows_what_wide_passes_cost() -> None:
    """A large model: nothing is measured twice, and what is known lies far apart."""
    machine = Machine(lambda width, held: 0.14 * (1 + 0.1 * (width - 1)))
    measured = measure_passes(machine, machine.make_cache, clock=machine.clock)
    warming = 0.14 * (1 + SHORT // 16 * (1 + 0.1 * 15))
    assert machine.now - warming < 2
    assert {1, 8, 32} <= set(measured[SHORT]) and measured[SHORT][32] == pytest.approx(0.14 * 4.1)
    assert DraftGate(CostTable(measured), Acceptance()).length(32, 31, carried=0, context=100) > 20


def test_a_window_alone_is_measured_once() -> None:
    machine = Machine(lambda width, held: 0.001, [lambda: RotatingKVCache(32)])
    assert list(measure_passes(machine, machine.make_cache, clock=machine.clock)) == [SHORT]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_architecture_can_be_measured(name: str) -> None:
    model = make(name)
    measured = measure_passes(model, lambda: make_prompt_cache(model), seconds=0.05)
    assert all(value > 0 for row in measured.values() for value in row.values())
    assert {1, 32} <= set(measured[SHORT])
