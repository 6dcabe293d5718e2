"""Requests that once cost a minute or the process: each is refused in time, and `/health` answers meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from start_llm import app
from tests.fuzz.world import World, world
from tests.oracle import build_oracle

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
HEALTH_SECONDS = 1.0
"""On two quiet cores the worst answer takes 0.1 s; the rest is for neighbours. Each of these once took over 5 s."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("attacks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "GRAMMAR_SECONDS", 3.0)
        with world(build_oracle(folder / "model"), folder / "cache") as made:
            yield made


def schema(**keywords: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": keywords}}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "messages": USER} | fields).encode()


STRINGS = {f"p{i}": {"type": "string"} for i in range(5_000)}
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": STRINGS}}
PRODUCT = schema(allOf=[{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83)])
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
    "a multiple of a product of primes": (lambda: chat(response_format=PRODUCT), "within 3 s"),
}


def watched(served: World, act: Callable[[], httpx.Response]) -> tuple[httpx.Response, float, float]:
    """What `act` gives, how long it took, and the slowest answer of `/health` meanwhile."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(act()))
    began, worst = time.monotonic(), 0.0
    thread.start()
    with httpx.Client(base_url=served.app.server_url, timeout=60) as client:
        while thread.is_alive():
            asked = time.monotonic()
            assert client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - asked)
            time.sleep(0.01)
    return answers[0], time.monotonic() - began, worst


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_and_health_answers(name: str, served: World) -> None:
    make, says = ATTACKS[name]
    body = make()
    headers = {"Content-Type": "application/json"}
    url = f"{served.app.server_url}{CHAT}"
    answer, seconds, worst = watched(served, lambda: httpx.post(url, content=body, headers=headers, timeout=60))
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert seconds < 20 and worst < HEALTH_SECONDS
    assert served.noise.found == []
