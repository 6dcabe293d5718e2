"""Writing in batches on a thread of its own."""

from __future__ import annotations

import threading

from start_llm.files.batches import BatchWriter


def test_everything_is_written_in_its_order_in_few_batches():
    batches: list[list[int]] = []
    writer = BatchWriter("test", batches.append, gather_seconds=60.0)
    for number in range(100):
        writer.put(number)
    writer.close()  # waits for no gathering
    assert [number for batch in batches for number in batch] == list(range(100))
    assert len(batches) <= 3


def test_flush_waits_for_what_was_put_before():
    seen: list[str] = []
    writer = BatchWriter("test", seen.extend, gather_seconds=0.0)
    writer.put("one")
    writer.flush()
    assert seen == ["one"]
    writer.flush()  # nothing is waiting
    writer.close()


def test_after_close_nothing_is_taken_and_nothing_hangs():
    seen: list[str] = []
    writer = BatchWriter("test", seen.extend, gather_seconds=0.0)
    writer.close()
    writer.close()
    writer.put("late")
    writer.flush()
    assert seen == []


def test_writing_is_done_by_a_thread_of_that_name():
    names: list[str] = []
    writer = BatchWriter("its name", lambda batch: names.append(threading.current_thread().name), gather_seconds=0.0)
    writer.put(1)
    writer.close()
    assert names == ["its name"]
