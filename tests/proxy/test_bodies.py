"""Bodies in front of LiteLLM: whole, JSON of an object, and without LiteLLM's own parameters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from start_llm.core.protocol import AGENT_HEADER
from start_llm.proxy.bodies import LiteLLMNames, RequestBodies
from tests.proxy.test_access import Behind

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KNOWN = LiteLLMNames(
    parameters=frozenset({"api_base", "fallbacks", "tags", "metadata"}),
    nested=frozenset({"api_base"}),
    arguments=frozenset({"original_function"}),
)
FORM = (b"content-type", b"application/x-www-form-urlencoded")


def through(
    path: str, *pieces: bytes, gone: bool = False, more: tuple[bytes, bytes] = (b"x-more", b"1")
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """(status, body, headers): those that come through with status 200, or those of the refusal; 0: nothing comes."""
    behind = Behind()
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": gone or piece is not pieces[-1]} for piece in pieces
    ]
    messages.append({"type": "http.disconnect"})
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", str(sum(map(len, pieces))).encode()), more, FORM]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    layer = RequestBodies(behind, litellm_names=KNOWN, names={"mine": "default"}, most_bytes=1 << 20)
    asyncio.run(layer(scope, receive, send))
    if behind.bodies:
        return 200, behind.bodies[0], dict(behind.scopes[0]["headers"])
    return (sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"])) if sent else (0, b"", {})


def refused(path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
    status, body, headers = through(path, raw)
    assert status != 200 and headers[b"content-type"] == b"application/json", body
    answer = json.loads(body)
    assert (answer.get("type") == "error") is ("messages" in path), "in the words of the dialect"
    return status, answer["error"]


NO_OBJECTS = [
    b"", b"[]", b"null", b'"x"', b"5", b"{", b"a=b", b'{"temperature": NaN}', b"\xff{}", b'{"temperature": 1e999}',
    b'{"a":' + b"[" * 200_000, b'{"n": ' + b"9" * 5_000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", MESSAGES, "/messages", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("raw", NO_OBJECTS)
def test_what_is_no_object_is_400(path: str, raw: bytes) -> None:
    status, error = refused(path, raw)
    assert status == 400 and error["type"] == "invalid_request_error" and "body" in error["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses"])
@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("api_base", {"api_base": None}),
        ("fallbacks", {"fallbacks": ["x"]}),
        ("langfuse_anything", {"langfuse_anything": 1}),
        ("mock_testing_fallbacks", {"mock_testing_fallbacks": True}),
        ("litellm_metadata", {"litellm_metadata": {}}),
        ("metadata.api_base", {"metadata": {"a": 1, "api_base": "http://x"}}),
        ("metadata.aws_profile_name", {"metadata": {"aws_profile_name": "p"}}),
        ("extra_body.tags", {"extra_body": {"tags": 1}}),
    ],
)
def test_a_parameter_of_litellms_is_400_that_names_it(path: str, place: str, more: dict[str, Any]) -> None:
    status, error = refused(path, json.dumps({"model": "m", **more}).encode())
    assert status == 400 and place in error["message"]
    assert path == MESSAGES or error["param"] == place


@pytest.mark.parametrize("model", [[[0]], ["a"], {"a": {}}, 5, True, "a" * 257])
def test_a_model_that_is_no_name_is_400(model: Any) -> None:
    for path in (CHAT, MESSAGES):
        status, error = refused(path, json.dumps({"model": model}).encode())
        assert status == 400 and "model" in error["message"]
    assert through(CHAT, b'{"model": null}')[0] == 200


@pytest.mark.parametrize(
    ("path", "raw", "come_through"),
    [
        # What a client calls its own data is its own, and goes on to the byte.
        (CHAT, b'{"metadata":  {"tags": "a", "user_id": "u"}, "litellm_session_id": "s", "unknown": 1}', None),
        (MESSAGES, b'{"model": "tiny",  "input": "an \\"adapter\\" in a text"}', None),
        (MESSAGES, b'{"adapter":  null}', None),
        (MESSAGES, b"{}", None),
        (CHAT, b'{"model": "m", "original_function": "os.system"}', {"model": "m"}),  # LiteLLM would call it
        (CHAT, b'{"user": "a\\ud83d"}', {"user": "a\ufffd"}),  # as the server reads it
    ],
)
def test_what_comes_through(path: str, raw: bytes, come_through: dict[str, Any] | None) -> None:
    status, body, _ = through(path, raw)
    assert status == 200 and (body == raw if come_through is None else json.loads(body) == come_through)


def test_it_is_json_whatever_the_client_says_and_a_recording_is_what_it_is() -> None:
    status, _, headers = through(CHAT, b"{}")
    assert status == 200 and headers[b"content-type"] == b"application/json" and headers[b"x-more"] == b"1"
    status, body, headers = through("/v1/audio/transcriptions", b"\x00[")
    assert (status, body, headers[b"content-type"]) == (200, b"\x00[", FORM[1])


def test_a_body_in_pieces_and_one_that_ends_early() -> None:
    whole = json.dumps({"model": "mine", "adapter": "a"}).encode()
    status, body, headers = through(MESSAGES, whole[:5], whole[5:20], whole[20:])
    assert (status, json.loads(body)) == (200, {"model": "default+a"})
    assert headers[b"content-length"] == str(len(body)).encode()
    assert through(MESSAGES, whole[:5], gone=True)[0] == 0


def test_a_body_may_not_be_too_long() -> None:
    long = json.dumps({"a": "x" * (1 << 20)}).encode()
    assert refused(CHAT, long)[0] == 413
    assert refused("/v1/messages", long)[1]["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("path", "body", "come_through"),
    [
        (CHAT, {"messages": []}, {"messages": [], "session_id": "c1"}),
        (CHAT, {"chat_id": "mine"}, {"chat_id": "mine"}),
        ("/v1/responses", {"input": "a"}, {"input": "a", "extra_body": {"session_id": "c1"}}),
        (MESSAGES, {"messages": []}, {"messages": [], "metadata": {"user_id": '{"session_id": "c1"}'}}),
        (MESSAGES, {"metadata": {"user_id": "Ann"}}, {"metadata": {"user_id": "Ann"}}),
        ("/v1/embeddings", {"input": "a"}, {"input": "a"}),
    ],
)
def test_a_header_that_names_the_conversation_comes_through_in_the_body(
    path: str, body: dict[str, Any], come_through: dict[str, Any]
) -> None:
    status, found, _ = through(path, json.dumps(body).encode(), more=(b"x-openwebui-chat-id", b"c1"))
    assert (status, json.loads(found)) == (200, come_through)


@pytest.mark.parametrize(
    ("path", "body", "come_through"),
    [
        (MESSAGES, {"metadata": {"user_id": '{"a": 1, "session_id": "s"}'}}, '{"a": 1, "session_id": "s/child"}'),
        (MESSAGES, {"metadata": {"user_id": "user_1_session_0a-1"}}, "user_1_session_0a-1"),
        (MESSAGES, {"metadata": {"user_id": "Ann"}}, "Ann"),
        (MESSAGES, {}, None),
        (CHAT, {"session_id": "s"}, "s/child"),
        ("/v1/responses", {"session_id": "s"}, "s/child"),
    ],
)
def test_claude_codes_sub_agent_is_part_of_the_name(path: str, body: dict[str, Any], come_through: str | None) -> None:
    status, found, _ = through(path, json.dumps(body).encode(), more=(AGENT_HEADER.encode(), b"child"))
    there = json.loads(found)
    name = there.get("metadata", {}).get("user_id") if path == MESSAGES else there.get("session_id")
    assert status == 200 and (name or there.get("extra_body", {}).get("session_id")) == come_through
