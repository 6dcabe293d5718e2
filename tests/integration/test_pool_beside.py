"""What a load leaves to the models that are there: HTTP threads, and time to compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from start_llm.engine import assembly as building
from tests.integration.live import WAIT
from tests.integration.pooled import ask, states
from tests.waiting import until

THREADS = 4


def test_a_loaded_model_answers_while_as_many_as_may_wait_for_another(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read = threading.Event(), building.read_ahead

    def held_up(*given: Any) -> None:
        assert goes_on.wait(WAIT)
        read(*given)

    with serve(http_threads=THREADS, model_probe="off") as server:
        monkeypatch.setattr(building, "read_ahead", held_up)
        answers: list[httpx.Response] = []
        waiting = [
            threading.Thread(target=lambda: answers.append(ask(server, "oracle-hybrid"))) for _ in range(THREADS - 1)
        ]
        try:
            for each in waiting:
                each.start()
            registry = server.app.pool._registry
            until(lambda: sum(len(entry.waiting) for entry in registry.entries()) == THREADS - 1)
            assert states(server)["oracle-hybrid"] == "loading"
            assert ask(server, "default").status_code == 200
            for model in ("oracle-hybrid", "oracle-windowed"):
                refused = ask(server, model)
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0, refused.text
                assert "HTTP_THREADS" in refused.json()["error"]["message"]
            assert server.get("/health").status_code == 200
            assert ask(server, "default").status_code == 200
        finally:
            goes_on.set()
            for each in waiting:
                each.join(WAIT)
        assert [answer.status_code for answer in answers] == [200] * len(waiting)
        assert ask(server, "oracle-windowed").status_code == 200
