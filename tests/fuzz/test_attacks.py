"""Requests that once cost a minute or the process: each is refused in time, and `/health` answers meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.patience import Patience
from start_llm.modelpool import handles
from tests.fuzz.world import World, world
from tests.kinds import some
from tests.oracle import build_oracle

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
HEALTH_SECONDS = 20.0
"""The rest is for neighbours: `tests/stress/test_sieges.py` holds the limit of 0.2 s."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("attacks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handles, "GRAMMAR_SECONDS", 20.0)
        with world(build_oracle(folder / "model"), folder / "cache") as made:
            yield made


def schema(**keywords: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": keywords}}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "messages": USER} | fields).encode()


STRINGS = {f"p{i}": {"type": "string"} for i in range(5_000)}
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": STRINGS}}
PRODUCT = schema(allOf=[{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83)])
REQUIRED = schema(type="object", required=[f"r{i}" for i in range(15_000)])
RINGS = {"x": {"$ref": "#/$defs/y"}, "y": {"anyOf": [{"$ref": "#/$defs/x"}]}}
RING = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": RINGS}}
ALTERNATIVES = [{"anyOf": [{"required": [f"p{i}_{j}"]} for j in range(20)], "type": "object"} for i in range(40)]
MANY = "within the limit of a context, each word. "
ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "5,000 properties": (lambda: chat(response_format=schema(type="object", properties=STRINGS)), "3,000 schemas"),
    "5,000 properties of a strict tool": (lambda: chat(tools=[{"function": STRICT}]), "3,000 schemas"),
    "30,000 alternatives": (
        lambda: chat(response_format=schema(anyOf=[{"const": i} for i in range(30_000)])),
        "3,000 schemas",
    ),
    "a prompt of 40 MB": (lambda: chat(messages=[{"role": "user", "content": "a" * 40_000_000}]), "at least"),
    "a prompt of 8 MB": (lambda: chat(messages=[{"role": "user", "content": MANY * 190_000}]), "at least"),
    "a multiple of several primes": (lambda: chat(response_format=PRODUCT), "3,000 schemas"),
    "15,000 names that are required": (lambda: chat(response_format=REQUIRED), "3,000 schemas"),
    "a schema that refers to itself": (lambda: chat(response_format=schema(**{"$ref": "#"})), "leads back to itself"),
    "a ring of a strict tool": (lambda: chat(tools=[{"function": RING}], stream=True), "leads back to itself"),
    "a constant of 200 kB": (
        lambda: chat(response_format=schema(const="x" * 200_000), stream=True),
        "20,000 characters",
    ),
    "40 times 20 alternatives": (lambda: chat(response_format=schema(allOf=ALTERNATIVES)), "schema too large"),
}


def watched(served: World, act: Callable[[], httpx.Response]) -> tuple[httpx.Response, float]:
    """What `act` gives, and the slowest answer of `/health` meanwhile."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(act()))
    worst = 0.0
    thread.start()
    with httpx.Client(base_url=served.app.server_url, timeout=60) as client:
        while thread.is_alive():
            asked = time.monotonic()
            assert client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - asked)
            time.sleep(0.01)
    return answers[0], worst


@pytest.mark.parametrize("name", some(sorted(ATTACKS, key=lambda name: "40 MB" in name), 4))
def test_it_is_refused_and_health_answers(name: str, served: World) -> None:
    make, says = ATTACKS[name]
    body = make()
    headers = {"Content-Type": "application/json"}
    url = f"{served.app.server_url}{CHAT}"
    answer, worst = watched(served, lambda: httpx.post(url, content=body, headers=headers))
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert worst < HEALTH_SECONDS
    assert served.noise.found == []


def test_a_grammar_that_is_never_made_is_given_up(served: World, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(Grammars, "prepare", lambda self, constraint: over.wait(60))
    run = Patience.run

    def briefly(self: Patience, call: Any, *args: Any) -> Any:
        monkeypatch.setattr(self, "_seconds", 1.0)
        return run(self, call, *args)

    monkeypatch.setattr(Patience, "run", briefly)
    body = json.loads(chat(response_format=schema(type="object")))
    with httpx.Client(base_url=served.app.server_url, timeout=60) as client:
        try:
            answers = [client.post(CHAT, json=body) for _ in range(3)]
        finally:
            over.set()
        assert [answer.status_code for answer in answers] == [400, 400, 503]
        assert "within 1 s" in answers[0].json()["error"]["message"]
        assert "others are being made" in answers[2].json()["error"]["message"]
        assert client.post(CHAT, json=json.loads(chat())).status_code == 200
