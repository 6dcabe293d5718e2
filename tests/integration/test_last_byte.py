"""Behind the last byte of an answer all is visible that follows from it: to the next request, on any connection."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from start_llm.api import handler
from start_llm.api.openai.responses_store import OwnResponses
from start_llm.chat.stream import WaitingStream
from start_llm.core.prompt import Prompt
from start_llm.dashboard.audit import AUDIT_FILE, Audit, Wanted, entries
from start_llm.dashboard.request_log import RequestLog
from start_llm.prompt.pipeline import Pipeline
from tests.integration.live import WAIT, Live
from tests.integration.pooled import admin

LATE_SECONDS = 0.05
MODEL = "oracle-plain"


@dataclass
class Answered:
    """One answer, read to its last byte."""

    server: Live
    id: str
    text: str
    messages: list[dict[str, Any]]
    next: httpx.Client  # whoever asks next: on the same connection, or on another one


BODIES: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
    "/v1/chat/completions": lambda messages: {"messages": messages},
    "/v1/messages": lambda messages: {"messages": messages, "max_tokens": 200},
    "/v1/responses": lambda messages: {"input": messages},
    "/api/chat": lambda messages: {"messages": messages},
}


def ask(server: Live, client: httpx.Client, path: str, *, stream: bool, number: int) -> tuple[str, str, list[Any]]:
    """The answer's id in ``x-request-id``, its text, and what was sent."""
    messages = [{"role": "user", "content": f"[[truth]] number {number}"}]
    body = {"model": "default", "stream": stream, **BODIES[path](messages)}
    answer = client.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.text, messages


# --- what follows from an answer: each says whether it is there ---------------------------------


def the_model_is_given_back(answered: Answered) -> bool:
    return all(entry.users == 0 for entry in answered.server.app.pool._registry.entries())


def nothing_runs(answered: Answered) -> bool:
    health = answered.next.get(f"{answered.server.url}/health").json()
    return (health["running"], health["queued"]) == (0, 0)


def the_report_is_there(answered: Answered) -> bool:
    return answered.next.get(f"{answered.server.url}/v1/cache/requests/{answered.id}").status_code == 200


def the_request_is_counted(answered: Answered) -> bool:
    text = answered.next.get(f"{answered.server.url}/metrics").text
    ended = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("start_llm_requests_total{"))
    active = [line.split()[-1] for line in text.splitlines() if line.startswith("start_llm_requests_active")]
    return ended == len(answered.server.prompts) and active in (["0.0"], [])


def the_audit_has_it(answered: Answered) -> bool:
    rows = entries(answered.server.cache / AUDIT_FILE, Wanted(), 50)
    return answered.id in {row.id for row in rows}


def the_session_log_has_it(answered: Answered) -> bool:
    logs = (answered.server.cache / "logs").rglob("*.jsonl")
    return any(f'"{answered.id}"' in path.read_text("utf-8") for path in logs)


def its_kv_is_stored(answered: Answered) -> bool:
    """All tokens of the prompt: none are in a row any more."""
    tokens = answered.server.prompts[answered.id]
    return answered.server.app.engine.plan(Prompt(tokens)).reused >= len(tokens) - 1


VISIBLE = (
    the_model_is_given_back,
    nothing_runs,
    the_report_is_there,
    the_request_is_counted,
    the_audit_has_it,
    the_session_log_has_it,
    its_kv_is_stored,
)


@pytest.fixture
def server(serve: Callable[..., Any]) -> Iterator[Live]:
    with serve(model_probe="off", audit_days=1, enable_request_logging=True) as running:
        yield running


def late(server: Live, path: str, *, stream: bool, same: bool, rounds: int) -> dict[str, int]:
    """How often each thing was not there yet."""
    missed = {check.__name__: 0 for check in VISIBLE}
    with httpx.Client(timeout=WAIT) as client, httpx.Client(timeout=WAIT) as other:
        for number in range(rounds):
            id, text, messages = ask(server, client, path, stream=stream, number=number)
            answered = Answered(server, id, text, messages, client if same else other)
            for check in VISIBLE:
                missed[check.__name__] += not check(answered)
    return missed


@pytest.mark.parametrize("same", [True, False], ids=["one connection", "two connections"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", list(BODIES))
def test_all_is_visible_behind_the_last_byte(
    server: Live, path: str, stream: bool, same: bool, request: pytest.FixtureRequest
) -> None:
    rounds = 200 if request.config.getoption("--slow") else 8
    assert late(server, path, stream=stream, same=same, rounds=rounds) == {c.__name__: 0 for c in VISIBLE}


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """It happens a moment later, on another thread."""

    def begin(*given: Any, **named: Any) -> None:
        threading.Timer(LATE_SECONDS, function, given, named).start()

    return begin


PLANTED: dict[str, tuple[Any, str, str]] = {
    "lease": (WaitingStream, "close", "the_model_is_given_back"),
    "audit": (Audit, "ended", "the_audit_has_it"),
    "session log": (RequestLog, "ended", "the_session_log_has_it"),
    "observers": (handler.Observation, "_end", "the_request_is_counted"),
}


@pytest.mark.parametrize("place", list(PLANTED))
def test_what_comes_later_is_found(server: Live, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, check = PLANTED[place]
    monkeypatch.setattr(owner, name, delayed(getattr(owner, name)))
    assert late(server, "/v1/chat/completions", stream=True, same=True, rounds=3)[check] > 0


def test_the_next_turn_waits_for_the_one_before(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording is slower than a last byte: who goes on from an answer waits for it."""
    record = Pipeline.record
    recording = threading.Semaphore(0)

    def slow(self: Pipeline, *given: Any) -> None:
        recording.acquire(timeout=LATE_SECONDS)
        record(self, *given)

    monkeypatch.setattr(Pipeline, "record", slow)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "[[truth]] [[think: a while]]"}]
    with httpx.Client(timeout=WAIT) as client:
        for _ in range(5):
            body = {"model": "default", "messages": messages}
            answer = client.post(f"{server.url}/v1/chat/completions", json=body).json()
            report = answer["usage"]["start_llm"]
            if len(messages) > 1:  # without the turn, the reasoning that the client left out parts them
                assert report["computed"] < 40, report
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "[[truth]] go on"}]


def test_a_model_can_be_unloaded_when_its_answer_is_there(server: Live, request: pytest.FixtureRequest) -> None:
    for number in range(20 if request.config.getoption("--slow") else 3):
        with httpx.Client(timeout=WAIT) as client:
            body = {"model": "oracle-hybrid", "stream": number % 2 == 0, "messages": [{"role": "user", "content": "x"}]}
            assert client.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
        assert admin(server, "unload", model="oracle-hybrid").status_code == 200


def test_a_response_can_be_read_when_its_last_byte_is_there(server: Live) -> None:
    with httpx.Client(timeout=WAIT) as client:
        for stream in (True, False) * 4:
            body = {"model": "default", "stream": stream, "input": "[[truth]]", "store": True}
            answer = client.post(f"{server.url}/v1/responses", json=body)
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            whole = json.loads(lines[-1][6:])["response"] if stream else answer.json()
            assert client.get(f"{server.url}/v1/responses/{whole['id']}").status_code == 200


def test_a_response_that_is_stored_later_is_found(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnResponses, "put", delayed(OwnResponses.put))
    body = {"model": "default", "input": "[[truth]]", "store": True}
    with httpx.Client(timeout=WAIT) as client:
        answer = client.post(f"{server.url}/v1/responses", json=body).json()
        assert client.get(f"{server.url}/v1/responses/{answer['id']}").status_code == 404
