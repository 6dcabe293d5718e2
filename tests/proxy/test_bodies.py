"""Bodies in front of LiteLLM: whole, JSON of an object, and without LiteLLM's own parameters.

Fields of this server's own are folded into places that LiteLLM passes on, and no other provider gets them. That LiteLLM
passes them on: `test_dialects`, and `integration/test_sdk`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from start_llm.api.anthropic.messages import MessagesBody
from start_llm.api.common.fields import BodyModel
from start_llm.api.common.request import FIELDS
from start_llm.api.openai.chat import ChatBody
from start_llm.api.openai.responses import ResponsesBody
from start_llm.api.openai.responses_stream import seal
from start_llm.core.protocol import AGENT_HEADER, SESSION_FIELDS, thinking_signature
from start_llm.proxy.asgi import LARGE, off_the_loop
from start_llm.proxy.bodies import LiteLLMNames, RequestBodies
from start_llm.proxy.own_fields import fold, for_provider
from tests.proxy.test_access import Behind, sent_by
from tests.vendors import openai

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
    headers = [(b"content-length", str(sum(map(len, pieces))).encode()), more, FORM]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    layer = RequestBodies(behind, litellm_names=KNOWN, names={"mine": "default"}, most_bytes=1 << 20)
    sent = sent_by(layer, scope, messages)
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


OTHERS = {"best_of", "max_tokens", "output_config", "output_format", "stop_sequences", "system", "thinking"}
"""Old names of OpenAI's, and Anthropic's."""
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}


NAMES = {"mine": "default", "tiny": "tiny", "openai/tiny": "tiny"}


@pytest.mark.parametrize(
    "dialect", ["chat/completions", "completions", "messages", "messages/count_tokens", "responses"]
)
@pytest.mark.parametrize("more", [{"adapter": "a"}, {"extra_body": {"adapter": "a"}}])
@pytest.mark.parametrize(("model", "behind"), [*NAMES.items(), ("x", "x")])
def test_an_adapter_goes_with_the_models_name(dialect: str, more: dict[str, Any], model: str, behind: str) -> None:
    found = fold(dialect, {"model": model, "max_tokens": 5, **more}, NAMES)
    assert found.pop("extra_body", {}) == {}
    assert found == {"model": f"{behind}+a", "max_tokens": 5}


def test_own_fields_of_responses_go_in_a_place_that_is_unfolded() -> None:
    plain, own = {"model": "tiny", "input": "hi", "tools": []}, {"min_p": 0.1, "top_k": 5}
    body = plain | own | {"extra_body": {"session_id": "s"}}
    assert fold("responses", body, NAMES) == plain | {"extra_body": own | {"session_id": "s"}}
    assert fold("messages", body, NAMES) is body, "there is no such place"
    for nothing_to_move in (plain, plain | {"adapter": None}, {"model": 5, "adapter": "a"}):
        assert fold("messages", nothing_to_move, NAMES) is nothing_to_move


def thinking(text: str, signed: str | None = None) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": thinking_signature(text) if signed is None else signed}


def messages(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": list(blocks)}]
    return {"model": "m", "max_tokens": 5, "messages": said, "thinking": {"type": "adaptive"}, **more}


def test_thinking_that_this_server_signed_stays_here_and_the_vendors_own_goes_back() -> None:
    sent = for_provider("messages", messages(thinking("ours"), CALL, context_management={"edits": []}))
    assert sent["messages"][1]["content"] == [CALL]
    assert "thinking" not in sent and "context_management" not in sent, "a vendor wants its own in front of the call"
    theirs = messages(thinking("theirs", "EqQBCg"), CALL)
    assert for_provider("messages", theirs) == theirs
    mixed = for_provider("messages", messages(thinking("ours"), thinking("theirs", "EqQBCg"), CALL))
    assert mixed["messages"][1]["content"] == [thinking("theirs", "EqQBCg"), CALL]


def test_a_turn_of_thinking_alone_keeps_its_place() -> None:
    sent = for_provider("messages", messages(thinking("ours")))
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant"]
    assert [block["type"] for block in sent["messages"][1]["content"]] == ["text"]


def test_reasoning_that_this_server_sealed_stays_here() -> None:
    ours = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("hm")}
    bare = {"type": "reasoning", "id": "rs_2", "summary": []}
    theirs = {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "gAAAA"}
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    sent = for_provider("responses", {"model": "m", "input": [ours, bare, theirs, call], "store": False})
    assert sent == {"model": "m", "input": [theirs, call], "store": False}
    assert for_provider("responses", {"model": "m", "input": "u"}) == {"model": "m", "input": "u"}


def test_parameters_that_only_this_server_knows_stay_here() -> None:
    said = [{"role": "assistant", "content": "a", "reasoning_content": "r"}, {"role": "user", "content": "u"}]
    own = {"min_p": 0.1, "drafts": False, "repetition_penalty": 1.1, "chat_template_kwargs": {}, "top_k": 4}
    sent = for_provider("chat/completions", {"model": "m", "messages": said, "temperature": 1, **own})
    assert sent == {"model": "m", "temperature": 1, "messages": [{"role": "assistant", "content": "a"}, said[1]]}
    assert for_provider("messages", {"model": "m", "messages": [], "top_k": 4})["top_k"] == 4


@pytest.mark.parametrize(
    ("dialect", "body", "others"),
    [
        ("chat/completions", ChatBody, OTHERS),
        ("responses", ResponsesBody, OTHERS),
        ("messages", MessagesBody, {*OTHERS, "top_k"}),
    ],
)
def test_every_field_that_is_read_here_is_another_vendors_too_or_stays_here(
    dialect: str, body: type[BodyModel], others: set[str]
) -> None:
    """A new field of our own belongs into OWN_FIELDS."""
    chat = openai.types.chat.completion_create_params.CompletionCreateParamsStreaming
    responses = openai.types.responses.response_create_params.ResponseCreateParamsStreaming
    openais = {*chat.__annotations__, *responses.__annotations__}
    nowhere_declared = {"adapter", "chat_template_kwargs", "extra_body", *SESSION_FIELDS, *FIELDS}
    given = dict.fromkeys([*body.model_fields, *nowhere_declared], 1)
    sent = for_provider(dialect, given).keys()
    assert sent - openais - others == set()
    assert given.keys() & (openais | others) == sent


def test_what_is_no_conversation_is_left_as_it_is() -> None:
    for dialect in ("chat/completions", "messages", "responses"):
        for body in ({"messages": "x", "input": 3}, {"messages": [1, {"content": 2}], "input": [None, 4]}, {}):
            assert for_provider(dialect, dict(body)) == body


@pytest.mark.parametrize("size", [LARGE, LARGE + 1])
def test_a_large_body_does_not_hold_the_event_loop(size: int) -> None:
    reader = asyncio.run(off_the_loop(size, threading.get_ident))
    assert (reader == threading.get_ident()) == (size == LARGE)
