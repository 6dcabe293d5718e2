"""Requests in any order on tiny models with sparse attention are answered as upstream's own loop answers them."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import BatchKVCache

from tests.models.chaos import TOGETHER, TYPES, play

HAPPENS = ("forks", "reused", "faults", "restarts", "cancels", "squeezes", "evicted segments", "files read", "drafts")


def check(counts: Counter[str], orders: int) -> None:
    """Enough happened, and most were answered all the same."""
    happened = [name for name in HAPPENS if counts[name]]
    assert len(happened) >= (len(HAPPENS) if orders > 1 else 6), counts
    assert counts["reused"] > 100 * orders and counts["answered"] > counts["requests"] / 3


@pytest.mark.thorough
def test_forks_faults_and_restarts_change_no_answer() -> None:
    check(play(TYPES[0], range(2)), 2)


@pytest.mark.thorough
def test_the_same_of_rows_in_one_batch() -> None:
    counts = play(TOGETHER, range(2))
    check(counts, 2)
    assert counts["steps of several rows"] > 20, counts


@pytest.mark.thorough
def test_a_row_that_stays_with_the_kv_of_another_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered = BatchKVCache.filter
    monkeypatch.setattr(BatchKVCache, "filter", lambda batch, kept: filtered(batch, mx.zeros_like(mx.array(kept))))
    with pytest.raises(AssertionError, match="hy_v4, order"):
        play(TOGETHER, range(2))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("name", [*TYPES, TOGETHER])
def test_five_hundred_orders_of_each_type(name: str, part: int) -> None:
    check(play(name, range(1000 + 50 * part, 1050 + 50 * part)), 50)
