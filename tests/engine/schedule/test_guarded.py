"""A store that raises, method by method: requests are answered all the same, from an empty cache if need be."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from start_llm.engine.schedule.guarded import NOT_RESTORABLE, STORE_ERROR
from tests.engine.fakes import FakeStore, ask, submit
from tests.engine.schedule.test_scheduler import drain, idle, make

METHODS = ("lookup", "restore", "stops", "put", "idle", "has_room", "estimate", "set_budget", "stats")


class Broken(FakeStore):
    """Raises in one method, always."""

    def break_(self, method: str) -> Broken:
        def fail(*_: Any, **__: Any) -> Any:
            raise MemoryError("out of memory")

        fail.__name__ = method
        setattr(self, method, fail)
        return self


@pytest.mark.parametrize("method", METHODS)
def test_a_broken_store_costs_reuse_and_no_answer(method: str, caplog: pytest.LogCaptureFixture) -> None:
    scheduler, *_ = make(store=Broken().break_(method), memory=2**40)
    scheduler.idle_prefill.begin(submit("anchor", range(300, 350))[0])
    idle(scheduler)
    scheduler.store.idle()
    sinks = []
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b", "c"):
            sink = ask(scheduler, name, range(1, 200))
            drain(scheduler)
            sinks.append(sink)
        figures = scheduler.figures()
    assert [sink.done.reason for sink in sinks] == ["stop"] * 3
    assert sinks[0].tokens == sinks[1].tokens == sinks[2].tokens
    assert figures["kv_errors"] >= 1
    if method == "lookup":
        assert sinks[1].done.report.miss is not None and sinks[1].done.report.miss.reason == STORE_ERROR


def test_the_first_error_of_a_method_is_told_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, *_ = make(store=Broken().break_("put"))
    with caplog.at_level(logging.WARNING):
        ask(scheduler, "a", range(1, 200))
        drain(scheduler)
    told = [record for record in caplog.records if "failed in put" in record.message]
    assert len(told) >= 2
    assert [record.exc_info is not None and record.exc_info is not False for record in told] == [True] + [False] * (
        len(told) - 1
    )


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
