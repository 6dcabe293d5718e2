from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import suppress

import pytest

from start_llm.core.errors import BadRequest, NotSupported, Unavailable
from start_llm.engine import patience as patience_module
from start_llm.engine.patience import Patience
from tests.waiting import until


def test_results_and_errors_come_back() -> None:
    patience = Patience("grammar", threads=1, seconds=60)
    assert patience.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(NotSupported, match="no"):
        patience.run(fail, NotSupported("no"))
    with pytest.raises(TimeoutError, match="its own"):
        patience.run(fail, TimeoutError("its own"))
    with pytest.raises(SystemExit):
        patience.run(fail, SystemExit(1))
    assert patience.run(lambda: threading.current_thread().daemon)


def fail(error: BaseException) -> None:
    raise error


def test_who_waits_too_long_goes_on_and_the_thread_keeps_its_place() -> None:
    patience, go = Patience("grammar", threads=2, seconds=0.1), threading.Event()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"could not be made into a grammar within 0\.1 s"):
            patience.run(go.wait, 30)
    with pytest.raises(Unavailable, match="others are being made"):
        patience.run(int)
    assert time.monotonic() - began < 25
    go.set()

    def can_work() -> bool:
        with suppress(Unavailable, BadRequest):
            return patience.run(int) == 0
        return False

    until(can_work)


def test_a_process_that_was_stopped_is_no_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a wait is over at once then, however long it was."""
    waited: list[float] = []
    wait = patience_module.wait

    def stopped(calls: list[Future[int]], seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 3:  # three stops, one after the other
            wait(calls, seconds)
        elif len(waited) == 3:
            go.set()

    go = threading.Event()
    monkeypatch.setattr(patience_module, "wait", stopped)
    assert Patience("grammar", threads=1, seconds=300).run(go.wait, 60) is True
    assert len(waited) > 3 and sum(waited) < 300
