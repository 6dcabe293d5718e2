"""What is kept of a request is seen by the key that made it only; without keys, on this machine only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.api.http import access
from start_llm.api.http.access import NOBODY, RequestOwners, Visitor, visitor_of
from start_llm.api.http.routes import Request
from start_llm.api.http.wire import Headers
from start_llm.api.ops.status import Status
from start_llm.api.server import ApiServer
from start_llm.core.errors import NotFound
from start_llm.core.hosts import is_loopback
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.request_log import RequestLog
from tests.api.conftest import CHAT, Connect, Raw, Serve
from tests.api.fakes import REPORT, FakeService

ANN, BOB = "Authorization: Bearer ann\r\n", "x-api-key: bob\r\n"


def stored(raw: Raw, who: str, **more: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = raw.post("/v1/responses", {"model": "m", "input": "a secret"} | more, who).response()
    return status, json.loads(body)


def ask(raw: Raw, path: str, who: str, method: str = "GET") -> tuple[int, Any]:
    status, _, body = raw.get(path, who, method).response()
    return status, json.loads(body)


def test_a_stored_response_is_seen_by_its_key_only(server: ApiServer, connect: Connect) -> None:
    """Nor goes anybody else on from it; it is asked for by its path in `tests/api/test_table.py`."""
    raw = connect(server)
    made = stored(raw, ANN)[1]["id"]
    path = f"/v1/responses/{made}"
    for who in (BOB, ""):
        status, told = stored(raw, who, previous_response_id=made)
        assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
        for other in ("/v1/responses/input_tokens", "/v1/cache/explain"):
            answer = raw.post(other, {"input": "x", "previous_response_id": made}, who).response()
            assert answer[0] == 404 and b"secret" not in answer[2]
    assert ask(raw, f"{path}/input_items", "X-Api-Key: ann\r\n")[1]["data"][0]["content"] == "a secret"
    assert stored(raw, ANN, previous_response_id=made)[0] == 200
    assert ask(raw, path, ANN, "DELETE")[0] == 200


def test_a_stored_response_is_seen_by_its_user_only(server: ApiServer, connect: Connect) -> None:
    """One backend, one key, many customers."""
    raw = connect(server)
    path = f"/v1/responses/{stored(raw, ANN, user='alicia')[1]['id']}"
    assert ask(raw, f"{path}?user=", ANN)[0] == 404
    made = path.rpartition("/")[2]
    for other in ({}, {"user": "robert"}, {"safety_identifier": "robert"}):
        assert stored(raw, ANN, previous_response_id=made, **other)[0] == 404
    assert stored(raw, ANN, previous_response_id=made, safety_identifier="alicia")[0] == 200
    assert ask(raw, f"{path}/input_items?user=alicia", ANN)[1]["data"][0]["content"] == "a secret"
    assert ask(raw, f"{path}?user=alicia", ANN, "DELETE")[0] == 200


def test_the_end_of_an_id_is_enough(server: ApiServer, service: Any, connect: Connect) -> None:
    raw = connect(server)
    made = raw.post("/v1/chat/completions", CHAT, ANN).response()[1]["x-request-id"]
    service.cache_report = lambda request_id: REPORT if request_id == made else None
    path = f"/v1/cache/requests/{made[-6:]}"
    assert [ask(raw, path, who)[0] for who in (ANN, BOB, "")] == [200, 404, 200]
    told = ask(raw, path, ANN)[1]
    assert (told["id"], told["computed"]) == (made, 20)
    (recent,) = ask(raw, "/v1/cache/requests", ANN)[1]["requests"]
    assert (recent["miss"]["reason"], recent["status"]) == ("diverged", 200)
    assert ask(raw, f"/v1/cache/requests/{made[-5:]}", ANN)[0] == 404  # shorter than the terminal shows


def test_an_end_of_several_ids_is_told_with_them() -> None:
    made = RequestOwners()
    for request_id, name in (("chat-1-abcdef", "ann"), ("chat-2-abcdef", "ann"), ("chat-3-abcdef", "bob")):
        made.remember(request_id, Visitor(name), None)
    assert made.ending(Visitor("ann"), "abcdef") == ["chat-1-abcdef", "chat-2-abcdef"]
    status = Status(FakeService(), Metrics(), RequestLog(None), made, Mock(), 0)
    inbound = Request("GET", "/", {}, params=("abcdef",), visitor=Visitor("ann"))
    with pytest.raises(NotFound, match="of 2 requests: chat-1-abcdef, chat-2-abcdef"):
        status.cache_request(inbound)


def test_from_another_machine_nothing_is_seen_without_a_server_key(
    server: ApiServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = connect(server)
    made = stored(raw, ANN)[1]["id"]
    monkeypatch.setattr(access, "is_loopback", lambda address: False)
    for who in (ANN, ""):
        assert ask(raw, f"/v1/responses/{made}", who)[0] == 404
        status, told = ask(raw, "/v1/cache/requests", who)
        assert status == 403 and "API_KEY" in told["detail"]
        assert raw.post("/v1/chat/completions", CHAT, who).response()[0] == 200
        status, body = stored(raw, who)
        assert (status, body["store"]) == (200, False)
        status, body = stored(raw, who, store=True)
        assert (status, body["error"]["param"]) == (400, "store")


def test_another_key_of_the_server_sees_nothing_of_the_last_one(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    first = serve(api_key="ann")
    made = stored(connect(first), ANN)[1]["id"]
    first.stop(0)
    second = serve(api_key="bob")
    assert ask(connect(second), f"/v1/responses/{made}", BOB)[0] == 404
    second.stop(0)
    assert ask(connect(serve(api_key="ann")), f"/v1/responses/{made}", ANN)[0] == 200


def test_who_is_who() -> None:
    here = "127.0.0.1"
    assert visitor_of({}, here, None) == Visitor("", sees_all=True, reads_all=True)
    assert visitor_of({}, "10.0.0.5", None) == visitor_of({"x-api-key": "k"}, "10.0.0.5", None) == NOBODY
    key = {"Authorization": "Bearer k"}
    assert visitor_of(key, "10.0.0.5", "k") == visitor_of(key, here, "k")
    assert visitor_of({}, here, "k").sees_all  # one key, one client: all that is kept is its own
    assert [is_loopback(name) for name in ("::1", "::ffff:127.0.0.1", "127.8.0.1")] == [True] * 3
    assert [is_loopback(name) for name in ("::", "::ffff:10.0.0.1", "fe80::1%eth0", "x", "")] == [False] * 5


PASSED_ON = [
    "X-Forwarded-For", "x-forwarded-host", "X-Forwarded-Proto", "Forwarded", "Forwarded-For", "X-Forwarded", "Via",
    "X-Real-IP", "CF-Connecting-IP", "CF-RAY", "True-Client-IP", "X-Client-IP", "X-Cluster-Client-IP",
]  # fmt: skip


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_client_behind_a_proxy_is_not_one_of_this_machine(name: str) -> None:
    for value in ("127.0.0.1", ""):
        assert visitor_of(Headers([(name, value)]), "127.0.0.1", None) == NOBODY
        assert visitor_of({name: value, "x-api-key": "k"}, "127.0.0.1", None) == NOBODY
        assert visitor_of({name: value}, "127.0.0.1", "k") == visitor_of({}, "10.0.0.5", "k")


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_KEPT", 3)
    made, ann = RequestOwners(), Visitor("ann")
    for request_id in "abcd":
        made.remember(request_id, ann, None)
    assert [made.may_see(ann, name) for name in "abcd"] == [False, True, True, True]
    made.remember("e", NOBODY, None)
    assert not made.may_see(NOBODY, "e") and not made.may_see(ann, "e")
