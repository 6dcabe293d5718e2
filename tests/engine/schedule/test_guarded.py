"""A store that raises, method by method: requests are answered all the same, from an empty cache if need be."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest

from start_llm.engine.schedule.guarded import NOT_RESTORABLE, STORE_ERROR
from tests.engine.fakes import FakeStore, ask, submit
from tests.engine.schedule.test_scheduler import drain, idle, make

METHODS = ("lookup", "restore", "stops", "put", "idle", "has_room", "estimate", "set_budget", "stats")


@pytest.mark.parametrize("method", METHODS)
def test_a_broken_store_costs_reuse_and_no_answer(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error of a method is told with its traceback."""
    store, broken = FakeStore(), Mock(side_effect=MemoryError("out of memory"), __name__=method)
    monkeypatch.setattr(store, method, broken)
    scheduler, *_ = make(store=store, memory=2**40)
    sinks = []
    with caplog.at_level(logging.WARNING):
        scheduler.idle_prefill.begin(submit("anchor", range(300, 350))[0])
        idle(scheduler)
        scheduler.store.idle()
        for name in ("a", "b", "c"):
            sink = ask(scheduler, name, range(1, 200))
            drain(scheduler)
            sinks.append(sink)
        figures = scheduler.figures()
    assert [sink.done.reason for sink in sinks] == ["stop"] * 3
    assert sinks[0].tokens == sinks[1].tokens == sinks[2].tokens
    told = [bool(record.exc_info) for record in caplog.records if f"failed in {method}" in record.message]
    assert figures["kv_errors"] == len(told) >= 1 and told == [True, *[False] * (len(told) - 1)]
    if method == "lookup":
        assert sinks[1].done.report.miss is not None and sinks[1].done.report.miss.reason == STORE_ERROR


def test_a_model_that_cannot_go_on_from_stored_kv_stores_none() -> None:
    scheduler, runner, store, _ = make(store=FakeStore(cuttable=False), memory=2**40, reuse=False)
    sinks = []
    for name in ("a", "b"):
        sink = ask(scheduler, name, range(1, 200), boundaries=(50, 100))
        drain(scheduler)
        sinks.append(sink)
    assert sinks[0].tokens == sinks[1].tokens and store.entries == [] and runner.work == 2 * 198
    miss = sinks[1].done.report.miss
    assert miss is not None and miss.reason == NOT_RESTORABLE
    assert scheduler.figures()["kv_errors"] == 0, "said once when the model is loaded, and no error a request"
