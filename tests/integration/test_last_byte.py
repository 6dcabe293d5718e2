"""Behind the last byte of an answer all is visible that follows from it: to the next request, on any connection."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from start_llm.api import handler
from start_llm.api.http.watcher import DisconnectWatcher
from start_llm.api.openai.responses_store import OwnResponses
from start_llm.chat.stream import WaitingStream
from start_llm.core.events import EngineDone, EngineEvent
from start_llm.core.prompt import Prompt
from start_llm.core.work import Submit
from start_llm.dashboard.audit import AUDIT_FILE, Audit, Wanted, entries
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.request_log import RequestLog
from start_llm.engine.schedule.requests import Requests
from start_llm.prompt.recorder import Recorder
from tests.integration.live import ENDLESS, WAIT, Live
from tests.kinds import RUN, rounds, some
from tests.waiting import until

LATE_SECONDS = 0.05

FORMS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "choices": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "n": 2}),
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 4}),
    "messages": ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 200}),
    "responses": ("/v1/responses", lambda text: {"input": text, "store": True}),
    "ollama chat": ("/api/chat", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "ollama generate": ("/api/generate", lambda text: {"prompt": text}),
}


@dataclass
class Answered:
    """One answer, read to its last byte."""

    server: Live
    form: str
    id: str
    next: httpx.Client  # whoever asks next: on the same connection, or on another one

    def get(self, path: str) -> httpx.Response:
        return self.next.get(f"{self.server.url}{path}")

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def clients(same: bool) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Who asks, and who looks."""
    with httpx.Client(timeout=WAIT) as one, httpx.Client(timeout=WAIT) as other:
        yield one, one if same else other


def ask(server: Live, client: httpx.Client, form: str, number: int, *, stream: bool) -> str:
    """The answer's id."""
    path, body = FORMS[form]
    sent = {"model": "default", "stream": stream, **body(f"[[truth]] number {number} of {form} {stream}")}
    answer = client.post(f"{server.url}{path}", json=sent)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


# --- what follows from an answer: each says whether it is there ---------------------------------


def the_model_is_given_back(answered: Answered) -> bool:
    return all(entry.users == 0 for entry in answered.server.app.pool._registry.entries())


def nothing_runs(answered: Answered) -> bool:
    health = answered.get("/health").json()
    return (health["running"], health["queued"]) == (0, 0)


def the_report_is_there(answered: Answered) -> bool:
    return answered.get(f"/v1/cache/requests/{answered.id}").status_code == 200


def the_request_is_listed(answered: Answered) -> bool:
    return answered.id in {entry["id"] for entry in answered.get("/v1/cache/requests").json()["requests"]}


def the_request_is_counted(answered: Answered) -> bool:
    counted = answered.metric("start_llm_requests_total"), answered.metric("start_llm_requests_active")
    return counted == (len(answered.server.prompts), 0)


def the_turn_is_recorded(answered: Answered) -> bool:
    """Of each conversation one; a raw prompt is none."""
    raw = sum(name.startswith("cmpl") for name in answered.server.prompts)
    return answered.metric("start_llm_prompt_records") == len(answered.server.prompts) - raw


def the_audit_has_it(answered: Answered) -> bool:
    return answered.id in {row.id for row in entries(answered.server.cache / AUDIT_FILE, Wanted(), 50)}


def the_session_log_has_it(answered: Answered) -> bool:
    logs = (answered.server.cache / "logs").rglob("*.jsonl")
    return any(f'"{answered.id}"' in path.read_text("utf-8") for path in logs)


def its_kv_is_stored(answered: Answered) -> bool:
    """All tokens of the prompt and of the answer: none are in a row any more."""
    tokens = answered.server.prompts[answered.id]
    return answered.server.app.engine.plan(Prompt(tokens)).reused >= len(tokens) - 1


def it_cannot_be_cancelled(answered: Answered) -> bool:
    return answered.next.post(f"{answered.server.url}/page/requests/{answered.id}/cancel").status_code == 404


def the_response_is_stored(answered: Answered) -> bool:
    return answered.form != "responses" or answered.get(f"/v1/responses/{answered.id}").status_code == 200


VISIBLE = (
    the_model_is_given_back,
    nothing_runs,
    the_report_is_there,
    the_request_is_listed,
    the_request_is_counted,
    the_turn_is_recorded,
    the_audit_has_it,
    the_session_log_has_it,
    its_kv_is_stored,
    it_cannot_be_cancelled,
    the_response_is_stored,
)


@pytest.fixture
def server(serve: Callable[..., Any]) -> Iterator[Live]:
    """Its `prompts` have the answers' tokens behind them."""

    @dataclass
    class WithAnswer:
        work: Submit

        def __call__(self, event: EngineEvent) -> None:
            name, _, choice = self.work.id.rpartition("#")
            if isinstance(event, EngineDone) and choice == "0":
                running.prompts[name] += event.tokens
            self.work.sink(event)

    with serve(model_probe="off", audit_days=1, enable_request_logging=True) as running:
        submit = running.app.engine.submit
        running.app.engine.submit = lambda work: submit(replace(work, sink=WithAnswer(work)))
        yield running


def late(server: Live, form: str, rounds: int, *, stream: bool, same: bool) -> set[str]:
    """What was not there yet in one of the rounds. Each round looks at another thing first."""
    missed = set()
    with clients(same) as (client, other):
        for number in range(rounds):
            answered = Answered(server, form, ask(server, client, form, number, stream=stream), other)
            first = number % len(VISIBLE)
            missed |= {check.__name__ for check in (*VISIBLE[first:], *VISIBLE[:first]) if not check(answered)}
    return missed


@pytest.mark.parametrize(
    ("stream", "same"),
    [
        pytest.param(True, True, id="streamed-one connection"),
        pytest.param(False, False, id="whole-two connections", marks=pytest.mark.thorough),
        pytest.param(True, False, id="streamed-two connections", marks=pytest.mark.slow),
        pytest.param(False, True, id="whole-one connection", marks=pytest.mark.slow),
    ],
)
def test_all_is_visible_behind_the_last_byte(
    server: Live, stream: bool, same: bool, request: pytest.FixtureRequest
) -> None:
    rounds = 200 if request.config.getoption("--slow") else len(VISIBLE)
    forms = FORMS if RUN.whole else ("messages", "responses")
    missed = {form: late(server, form, rounds, stream=stream, same=same) for form in forms}
    assert not any(missed.values()), missed


# --- a delay in each of these places ------------------------------------------------------------

Function = Callable[..., Any]


def slower(function: Callable[..., Any]) -> Callable[..., Any]:
    """It takes a moment longer."""

    def begin(*given: Any, **named: Any) -> Any:
        time.sleep(LATE_SECONDS)
        return function(*given, **named)

    return begin


def later(function: Function, go_on: threading.Event) -> Function:
    """It happens once `go_on` is set, on another thread."""

    def begin(*given: Any, **named: Any) -> None:
        threading.Thread(target=lambda: go_on.wait(WAIT) and function(*given, **named)).start()

    return begin


def behind_the_last_word(function: Function, go_on: threading.Event) -> Function:
    """The model thread tells that a request has ended before it stores the KV."""

    def begin(requests: Requests, job: Any, reason: Any, kv: Any) -> None:
        job.end(reason)
        go_on.wait(WAIT)
        function(requests, job, reason, kv)

    return begin


def unwatched_later(function: Function, go_on: threading.Event) -> Function:
    """A request's watch ends once `go_on` is set."""

    @contextmanager
    def watching(*given: Any) -> Iterator[Any]:
        watch = function(*given)
        yield watch.__enter__()
        later(watch.__exit__, go_on)(None, None, None)

    return watching


PLACES: dict[str, tuple[Any, str, Callable[[Function, threading.Event], Function], Callable[[Answered], bool]]] = {
    "KV": (Requests, "finish", behind_the_last_word, its_kv_is_stored),
    "turn": (Recorder, "finish", later, the_turn_is_recorded),
    "lease": (WaitingStream, "close", later, the_model_is_given_back),
    "watch": (DisconnectWatcher, "watch", unwatched_later, it_cannot_be_cancelled),
    "audit": (Audit, "ended", later, the_audit_has_it),
    "session log": (RequestLog, "ended", later, the_session_log_has_it),
    "request log": (RequestLog, "ended", later, the_request_is_listed),
    "metrics": (Metrics, "ended", later, the_request_is_counted),
    "observers": (handler.Observation, "_end", later, the_request_is_counted),
    "stored response": (OwnResponses, "put", later, the_response_is_stored),
}


@pytest.mark.parametrize("place", some(PLACES, 3))
def test_what_takes_longer_is_waited_for_and_what_comes_later_is_found(server: Live, place: str) -> None:
    owner, name, postponed, check = PLACES[place]
    function, go_on = getattr(owner, name), threading.Event()
    with patch.object(owner, name, slower(function)):
        for stream in (True, False):
            assert late(server, "responses", 2, stream=stream, same=False) == set()
    with patch.object(owner, name, postponed(function, go_on)), clients(same=True) as (client, _):
        answered = Answered(server, "responses", ask(server, client, "responses", -1, stream=True), client)
        there = check(answered)
        go_on.set()
        assert not there
    until(lambda: the_model_is_given_back(answered))


# --- what else a next request may ask for -----------------------------------------------------------


def test_an_answer_that_failed_is_told_so_behind_all_the_rest(server: Live) -> None:
    """Cancelled in the middle of a stream: with the last byte of the error the model is free and the end is known."""
    messages = [{"role": "user", "content": "[[long 100000]]"}]
    body = {"model": "default", "stream": True, "messages": messages, **ENDLESS}
    with clients(same=False) as (client, other):
        for _ in range(rounds(5, 2)):
            with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
                name = answer.headers["x-request-id"]
                lines = answer.iter_lines()
                next(line for line in lines if '"content":" the' in line)
                assert other.post(f"{server.url}/page/requests/{name}/cancel").status_code == 200
                assert any("cancelled" in line for line in lines)
            answered = Answered(server, "chat", name, other)
            checks = (the_model_is_given_back, the_request_is_listed, the_request_is_counted, the_audit_has_it)
            assert [check.__name__ for check in (nothing_runs, *checks) if not check(answered)] == []


def test_who_acts_on_the_end_of_an_answer_before_its_last_byte_finds_the_turn(server: Live) -> None:
    """Some clients go on at `finish_reason`, and read no further."""
    with patch.object(Recorder, "finish", slower(Recorder.finish)), clients(same=False) as (client, other):
        for number in range(3):
            ask_for = [{"role": "user", "content": f"[[truth]] [[think: a while]] {number}"}]
            body = {"model": "default", "stream": True, "messages": ask_for}
            with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if '"finish_reason":"stop"' in line:
                        break
                name = answer.headers["x-request-id"]
                assert the_turn_is_recorded(Answered(server, "chat", name, other))


def test_the_parts_of_an_answer_do_not_wait_for_what_its_end_waits_for(server: Live) -> None:
    """Only the end of a stream is held up: all of its text is out before that."""
    recording, go_on, finish = threading.Event(), threading.Event(), Recorder.finish

    def held(*given: Any) -> None:
        recording.set()
        assert go_on.wait(WAIT)
        finish(*given)

    said = [{"role": "system", "content": "[[say: all of it]]"}, {"role": "user", "content": "go"}]
    held_back = "it or not"  # the last word may become this: it is told when the model has ended
    body = {"model": "default", "stream": True, "messages": said, "stop": [held_back]}
    url = f"{server.url}/v1/chat/completions"
    with patch.object(Recorder, "finish", held), clients(same=True) as (client, _):
        with client.stream("POST", url, json=body) as answer:
            text = ""
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if text == "all of it":
                    assert recording.wait(WAIT)
                    go_on.set()
        assert text == "all of it" and go_on.is_set()
