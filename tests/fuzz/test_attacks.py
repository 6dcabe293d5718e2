"""Requests that once cost a minute or the process: each is refused in time, and `/health` answers meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.patience import Patience
from start_llm.modelpool import handles
from tests.api.attacks import CHAT, Attack, chat, worst_health
from tests.fuzz.world import World, world
from tests.kinds import some
from tests.oracle import build_oracle

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


def attack(name: str, says: str, **fields: Any) -> Attack:
    return Attack(name, CHAT, chat(model="default", **fields), 400, says)


def prompt(name: str, words: str, count: int) -> Attack:
    """It is made in its test."""
    made = lambda: attack(name, "", messages=[{"role": "user", "content": words * count}]).body  # noqa: E731
    return Attack(name, CHAT, made, 400, "at least")


STRINGS = {f"p{i}": {"type": "string"} for i in range(5_000)}
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": STRINGS}}
PRODUCT = schema(allOf=[{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83)])
REQUIRED = schema(type="object", required=[f"r{i}" for i in range(15_000)])
RINGS = {"x": {"$ref": "#/$defs/y"}, "y": {"anyOf": [{"$ref": "#/$defs/x"}]}}
RING = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": RINGS}}
ALTERNATIVES = [{"anyOf": [{"required": [f"p{i}_{j}"]} for j in range(20)], "type": "object"} for i in range(40)]
MANY = "within the limit of a context, each word. "
ATTACKS = [
    attack("5,000 properties", "3,000 schemas", response_format=schema(type="object", properties=STRINGS)),
    attack("5,000 properties of a strict tool", "3,000 schemas", tools=[{"function": STRICT}]),
    attack("30,000 alternatives", "3,000 schemas", response_format=schema(anyOf=[{"const": i} for i in range(30_000)])),
    attack("a multiple of several primes", "3,000 schemas", response_format=PRODUCT),
    attack("15,000 names that are required", "3,000 schemas", response_format=REQUIRED),
    attack("a schema that refers to itself", "leads back to itself", response_format=schema(**{"$ref": "#"})),
    attack("a ring of a strict tool", "leads back to itself", tools=[{"function": RING}], stream=True),
    attack("a constant of 200 kB", "20,000 characters", response_format=schema(const="x" * 200_000), stream=True),
    attack("40 times 20 alternatives", "schema too large", response_format=schema(allOf=ALTERNATIVES)),
    prompt("a prompt of 8 MB", MANY, 190_000),
    prompt("a prompt of 40 MB", "a", 40_000_000),
]


@pytest.mark.parametrize("attack", some(ATTACKS, 4), ids=lambda attack: attack.name)
def test_it_is_refused_and_health_answers(attack: Attack, served: World) -> None:
    body, answers = attack.body, list[httpx.Response]()
    headers = {"Content-Type": "application/json"}
    url = served.app.server_url
    worst = worst_health(url, lambda: answers.append(httpx.post(f"{url}{CHAT}", content=body, headers=headers)))
    assert answers[0].status_code == 400, answers[0].text
    assert attack.names in answers[0].json()["error"]["message"]
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
    body = json.loads(attack("a form", "", response_format=schema(type="object")).body)
    with httpx.Client(base_url=served.app.server_url, timeout=60) as client:
        try:
            answers = [client.post(CHAT, json=body) for _ in range(3)]
        finally:
            over.set()
        assert [answer.status_code for answer in answers] == [400, 400, 503]
        assert "within 1 s" in answers[0].json()["error"]["message"]
        assert "others are being made" in answers[2].json()["error"]["message"]
        assert client.post(CHAT, json=body | {"response_format": None}).status_code == 200
