"""Who asks: the same person gets the same digest in every dialect, two people never do."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from start_llm.api.http.access import owner_of
from start_llm.core.request import ChatRequest
from tests.api import fakes
from tests.api.fakes import READERS


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest) -> Callable[..., ChatRequest]:
    return partial(fakes.read, request.param)


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
