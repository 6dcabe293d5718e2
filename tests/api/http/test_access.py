"""Who may ask: by name, by address, from which page."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from start_llm.api.http.access import owner_of
from start_llm.api.http.listener import check_bind
from start_llm.api.server import ApiServer
from start_llm.core.errors import StartLLMError
from start_llm.core.hosts import check_host
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings, SettingsError, load_settings
from tests.api import fakes
from tests.api.conftest import Raw
from tests.api.fakes import READERS


def bound(**values: Any) -> Settings:
    return Settings(_env_file=None, **values)  # type: ignore[call-arg]


def is_answered(settings: Settings, host: str) -> bool:
    try:
        check_host(host, settings.host_names)
    except StartLLMError:
        return False
    return True


@pytest.mark.parametrize("mlx_host", ["127.0.0.1", "0.0.0.0", "::", "192.168.1.5"])
def test_a_rebound_name_is_refused_wherever_the_server_listens(mlx_host: str) -> None:
    settings = bound(mlx_host=mlx_host)
    for host in ("localhost:8080", "LOCALHOST.", "x.localhost", "127.0.0.1", "[::1]:80", "192.168.1.5:80", "[fe80::1]"):
        assert is_answered(settings, host), host
    for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "2130706433", "", ":80", "[x]"):
        assert not is_answered(settings, host), host
    for host in ("a@localhost", "localhost/x", "localhost x", "localhost:80:80", "127.0.0.1#", "[::1"):
        assert not is_answered(settings, host), host


def test_names_that_are_allowed() -> None:
    settings = bound(mlx_host="mac.local", allowed_hosts="llm.lan, Other.LAN.,")
    for host in ("mac.local:8080", "MAC.local", "llm.lan", "other.lan", "OTHER.lan.:1"):
        assert is_answered(settings, host), host
    for host in ("lan", "x.llm.lan", "llm.lan.evil.example"):
        assert not is_answered(settings, host), host
    assert is_answered(bound(allowed_hosts="*"), "any.example")


@pytest.mark.parametrize("value", ["http://llm.lan", "llm.lan:8080", "a b", "..", "*.lan"])
def test_what_is_no_name_is_named(value: str) -> None:
    with pytest.raises(SettingsError, match="ALLOWED_HOSTS"):
        load_settings(None, allowed_hosts=value)


def test_the_server_asks_by_name(serve: Callable[..., ApiServer], connect: Callable[[ApiServer], Raw]) -> None:
    server = serve(mlx_host="0.0.0.0", api_key="k", allowed_hosts="llm.lan")
    for host, status in (("llm.lan", 200), ("evil.example", 403), ("127.0.0.1", 200)):
        head = f"GET /v1/models HTTP/1.1\r\nHost: {host}:80\r\nx-api-key: k\r\n\r\n"
        assert connect(server).send(head).response()[0] == status


@pytest.mark.parametrize("mlx_host", ["0.0.0.0", "::", "", "192.168.1.5", "mac.local"])
def test_without_a_key_the_server_stays_on_this_machine(mlx_host: str, serve: Callable[..., ApiServer]) -> None:
    with pytest.raises(SettingsError, match=r"API_KEY.*ALLOW_OPEN_BIND"):
        serve(mlx_host=mlx_host)
    check_bind(bound(mlx_host=mlx_host, api_key="k"))
    check_bind(bound(mlx_host=mlx_host, allow_open_bind=True))
    for here in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        check_bind(bound(mlx_host=here))


def test_events_of_stored_kv_stay_on_this_machine_as_well() -> None:
    for open_to_all in ("tcp://*:5557", "tcp://[::]:5557", "tcp://10.0.0.5:5557"):
        with pytest.raises(SettingsError, match=r"KV_EVENTS=.*API_KEY.*ALLOW_OPEN_BIND"):
            check_bind(bound(kv_events=open_to_all))
        check_bind(bound(kv_events=open_to_all, allow_open_bind=True))
    for here in ("tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:5557"):
        check_bind(bound(kv_events=here))


# --- who asks: the same person gets the same digest in every dialect, two people never do ---


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
