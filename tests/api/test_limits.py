"""Bounds stand before work: what is over one is refused at once, and others go on meanwhile."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.api.common import fields
from start_llm.api.common.fields import BodyModel, parse_body, short, within
from start_llm.api.server import ApiServer
from start_llm.core import limits
from start_llm.core.errors import BadRequest
from start_llm.core.jsontext import LARGE
from tests.api.attacks import ATTACKS, Attack, worst_health
from tests.api.fakes import FakeService
from tests.kinds import RUN
from tests.together import together

DOCS = Path(__file__).parents[2] / "docs" / "limits.md"


def post(server: ApiServer, path: str, body: bytes) -> tuple[int, str]:
    answer = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    return answer.status_code, answer.text


@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, marks=pytest.mark.thorough if "million" in each.name else []) for each in ATTACKS],
    ids=lambda attack: attack.name,
)
def test_a_request_over_a_limit_is_refused_by_name(attack: Attack, server: ApiServer, service: FakeService) -> None:
    status, body = post(server, attack.path, attack.body)
    assert (status, service.requests) == (attack.status, [])
    message = json.loads(body)["error"]["message"]
    assert attack.names in message
    assert len(message) < 400


def test_health_answers_while_large_bodies_are_refused(server: ApiServer) -> None:
    """The first of these bodies alone once took 50 s. `tests/stress/test_sieges.py` holds the limit of 0.2 s."""
    bodies = [(attack.path, attack.body) for attack in ATTACKS if len(attack.body) > 500_000]
    assert len(bodies) > 8
    posts = [partial(post, server, *each) for each in bodies[:: 1 if RUN.whole else 12]]
    assert worst_health(server.url, *posts) < 20.0


def test_what_is_within_the_limits_is_read(server: ApiServer, service: FakeService) -> None:
    """A long agent session: 8,000 messages, 400 tools of 40 parameters, code with an escape in every line."""
    properties = {f"parameter_{i}": {"type": "string", "description": "what it is for"} for i in range(40)}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(400)]
    code = 'def f(x):\n\treturn "x"\n' * 4
    messages = [{"role": "user", "content": code}, {"role": "assistant", "content": code}] * 4_000
    body = {"model": "m", "messages": messages, "tools": tools, "logit_bias": {str(i): -100 for i in range(40_000)}}
    assert post(server, "/v1/chat/completions", json.dumps(body).encode())[0] == 200
    assert len(service.requests[0].messages) == 8_000


def test_only_the_beginning_of_a_value_is_shown() -> None:
    huge = {"a" * 100_000: [["b" * 100_000] * 100_000] * 2}
    began = time.monotonic()
    assert short(huge) == '{"' + "a" * 75 + "..."
    assert short([[[[[[1]]]]]]) == '[[["..."]]]'
    assert short({1, 2}) == "a set"
    assert time.monotonic() - began < 20


def test_every_limit_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    found = [value for value in vars(limits).values() if isinstance(value, limits.Limit)]
    assert len(found) > 15
    for limit in found:
        assert f"| {limit.what} | {limit.most:,} | {limit.status} |" in text
    assert text.count("\n| ") - 1 == len(found)


def test_what_is_just_within_a_limit_is_allowed() -> None:
    within(limits.NAME, limits.NAME.most, "name")
    with pytest.raises(BadRequest, match="name: at most"):
        within(limits.NAME, limits.NAME.most + 1, "name")


# --- what large bodies make of objects is there once, not once for each thread ---


def test_large_bodies_are_checked_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    there, most = threading.Semaphore(0), list[int]()

    def validate(model: type[BodyModel], data: Any) -> BodyModel:
        there.release()
        most.append(there._value)
        time.sleep(0.01)  # others would come meanwhile
        assert there.acquire(blocking=False)
        return model()

    monkeypatch.setattr(fields, "validate", validate)
    large = json.dumps({"text": "x" * LARGE}).encode()
    together([partial(parse_body, BodyModel, large)] * 8)
    assert most == [1] * 8


def test_a_large_body_that_is_refused_keeps_no_other_one_waiting() -> None:
    wrong = json.dumps({"messages": [1] * LARGE}).encode()

    def refused() -> None:
        with pytest.raises(BadRequest):
            parse_body(BodyModel, wrong)

    refused()
    other = threading.Thread(target=refused, daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
