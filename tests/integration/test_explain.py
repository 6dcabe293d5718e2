"""`/v1/cache/explain` looks at what is stored while the model is in a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.live import WAIT, Live, Start
from tests.unique import unique
from tests.waiting import until


def test_explain_does_not_wait_for_the_model(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = tmp_path / "fault"
    monkeypatch.setenv("ORACLE_FAULT", str(fault))
    with start(max_concurrency=1) as server, ThreadPoolExecutor(3) as pool:
        messages = [{"role": "user", "content": "word " * 300 + "[[long 3]]"}]
        first = server.chat(messages)
        history = [*messages, first["message"], {"role": "user", "content": "and more"}]

        fault.write_text("hang")
        asking = [pool.submit(server.chat, [{"role": "user", "content": f"{i} hi"}]) for i in range(3)]
        until(lambda: (server.app.engine.status().running, server.app.engine.status().queued) == (1, 2))
        body = {"model": "default", "messages": history}
        report = server.post("/v1/cache/explain", json=body).json()
        assert (report["running"], report["queued"]) == (1, 2)
        assert report["reused"] >= first["body"]["usage"]["prompt_tokens"] and "miss" not in report
        assert report["reused"] + report["computed"] == report["prompt"]

        fault.unlink()
        for each in asking:
            each.result(WAIT)
        done = server.chat(history)
        assert done["report"]["reused"] == report["reused"]


def test_no_report_tells_what_another_client_has_stored(servers: Callable[..., Live]) -> None:
    """Who guesses how another conversation begins must not be told how it goes on."""
    server, secret = servers("plain"), "the password is quiet heron"
    opening = f"This is {unique()}. " + "word " * 200

    def ask(key: str, text: str, path: str = "/v1/chat/completions") -> httpx.Response:
        body = {"model": "default", "messages": [{"role": "user", "content": opening + text}]}
        return httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"})

    assert ask("theirs", secret).status_code == 200
    told = [ask("mine", "and what comes now?", "/v1/cache/explain"), ask("mine", "and what comes now?")]
    mine = told[1].json()
    assert mine["usage"]["start_llm"]["reused"] > 100  # equal tokens, equal KV
    for path in ("/v1/cache/requests", f"/v1/cache/requests/{mine['id']}", f"/page/requests/{mine['id']}"):
        told.append(httpx.get(server.url + path, headers={"Authorization": "Bearer mine"}))
    for answer in told:
        assert answer.status_code == 200
        assert not any(word in answer.text for word in ("password", "heron")), answer.text
