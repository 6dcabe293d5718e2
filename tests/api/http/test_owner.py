"""Who asks: the same person gets the same digest in every dialect, two people never do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from start_llm.api.anthropic.messages import read_messages
from start_llm.api.http.access import owner_of
from start_llm.api.http.routes import Request
from start_llm.api.http.wire import Headers
from start_llm.api.openai.chat import read_chat, read_completion
from start_llm.api.openai.responses import read_responses
from start_llm.api.openai.responses_store import ResponsesStore
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from tests.api.fakes import FakeService

SETTINGS = Settings(_env_file=None)  # type: ignore[call-arg]
MESSAGES = [{"role": "user", "content": "Hi"}]
STORE = ResponsesStore(Path("unused")).of(None)
SERVICE = FakeService()
READERS: dict[str, tuple[dict[str, Any], Callable[[Request], Any]]] = {
    "chat": ({"messages": MESSAGES}, lambda inbound: read_chat(inbound, SETTINGS, SERVICE)),
    "completions": ({"prompt": "Hi"}, lambda inbound: read_completion(inbound, SETTINGS, SERVICE)),
    "responses": ({"input": "Hi"}, lambda inbound: read_responses(inbound, SETTINGS, SERVICE, STORE)),
    "messages": (
        {"messages": MESSAGES, "max_tokens": 5},
        lambda inbound: read_messages(inbound, SETTINGS, SERVICE),
    ),
}


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest) -> Callable[..., ChatRequest]:
    base, reader = READERS[request.param]

    def call(headers: dict[str, str] | None = None, /, **fields: Any) -> ChatRequest:
        body = json.dumps({"model": "m"} | base | fields).encode()
        exchange: Any = reader(Request("POST", "/", Headers((headers or {}).items()), body))
        return exchange.request  # type: ignore[no-any-return]

    return call


def test_nobody_in_particular(read: Callable[..., ChatRequest]) -> None:
    assert read().owner is None
    assert read({"Authorization": "Basic abc", "x-api-key": " "}, user="", metadata={"user_id": ""}).owner is None


def test_a_key_is_the_same_in_both_headers(read: Callable[..., ChatRequest]) -> None:
    owner = read({"Authorization": "Bearer k1"}).owner
    assert owner is not None and len(owner) == 64 and "k1" not in owner
    assert read({"X-Api-Key": "k1"}).owner == read({"authorization": "bearer  k1 "}).owner == owner
    assert read({"X-Api-Key": "k2"}).owner not in {owner, None}


def test_users_of_one_key_differ(read: Callable[..., ChatRequest]) -> None:
    key = {"x-api-key": "k"}
    by_key = read(key).owner
    ann = read(key, user="ann").owner
    assert len({by_key, ann, read(key, user="bob").owner, read(user="ann").owner, None}) == 5
    assert read(key, metadata={"user_id": "ann"}).owner == ann
    assert read(key, safety_identifier="ann").owner == ann
    assert read({"x-api-key": 'k", "ann'}).owner not in {ann, by_key}


def test_a_session_inside_of_a_user_id_is_not_the_user(read: Callable[..., ChatRequest]) -> None:
    def owner(user_id: str) -> str | None:
        return read(metadata={"user_id": user_id}).owner

    first = owner("user_ab12_account_cd34_session_1111-2222")
    assert first == owner("user_ab12_account_cd34_session_3333-4444") is not None
    assert first != owner("user_ab99_account_cd34_session_1111-2222")
    first = owner(json.dumps({"device_id": "d", "session_id": "s"}))
    assert first == owner(json.dumps({"session_id": "t", "device_id": "d"})) is not None
    assert first != owner(json.dumps({"device_id": "e", "session_id": "s"}))
    assert first == owner(" \n" + json.dumps({"device_id": "d", "session_id": "u"})), "read as the session is"
    assert first == owner(json.dumps({"device_id": "d", "chat_id": "u"}))
    assert owner(json.dumps({"session_id": "s"})) is None, "the proxy puts a conversation's name there"
    assert owner("{" * 5000) != owner("{" * 5001)


def test_an_owner_is_of_one_key() -> None:
    """What another node of a fleet claims of a user counts for its own key alone, whatever it says in headers."""
    body = {"user": "ann"}
    ours, theirs = ({"Authorization": f"Bearer {key}"} for key in ("key-1", "fleet-key"))
    assert owner_of(body, ours) != owner_of(body, theirs)
    claims = {name: str(owner_of(body, ours)) for name in ("x-start-llm-owner", "x-forwarded-user", "x-user-id")}
    assert owner_of(body, theirs | claims) == owner_of(body, theirs)
