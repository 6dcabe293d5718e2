"""Writing in batches on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from start_llm.files.batches import BatchWriter
from start_llm.files.database import CacheDatabase


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., BatchWriter[Any]]:
    """A writer whose batches go to a function."""

    def begun(take: Callable[[list[Any]], object], gather_seconds: float = 0.0) -> BatchWriter[Any]:
        database = CacheDatabase(tmp_path / "file", "CREATE TABLE numbers (number INTEGER)", 1, what="test")
        return BatchWriter("its name", database, lambda connection, items: take(items), gather_seconds)

    return begun


def test_everything_is_written_in_its_order_in_few_batches_by_one_thread(begin):
    batches: list[list[int]] = []
    names: list[str] = []
    writer = begin(
        lambda batch: (batches.append(batch), names.append(threading.current_thread().name)), gather_seconds=60.0
    )
    for number in range(100):
        writer.put(number)
    writer.close()  # waits for no gathering
    assert [number for batch in batches for number in batch] == list(range(100))
    assert len(batches) <= 3 and {*names} == {"its name"}


def test_flush_waits_for_what_was_put_before_and_nothing_is_taken_after_close(begin):
    seen: list[str] = []
    writer = begin(seen.extend)
    writer.put("one")
    writer.flush()
    assert seen == ["one"]
    writer.flush()  # nothing is waiting
    writer.close()
    writer.close()
    writer.put("late")
    writer.flush()
    assert seen == ["one"]


def test_after_a_batch_that_goes_wrong_the_next_one_is_written(begin, caplog):
    seen: list[float] = []
    writer = begin(lambda batch: seen.extend(1 / number for number in batch))
    for number in (0, 2):
        writer.put(number)
        writer.flush()
    writer.close()
    assert seen == [0.5] and "test: 1 rows could not be written (division by zero)" in caplog.text
