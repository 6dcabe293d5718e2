"""`App.chat`'s way to the model: read, run and counted as a request over HTTP, without a socket."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from scripts.openapi_docs import OWN_FIELDS
from start_llm.api.direct import ChatFields
from start_llm.api.openai.chat import ChatBody
from start_llm.api.server import ApiServer
from start_llm.core.errors import BadRequest, Cancelled, ClientGone, StartLLMError
from start_llm.core.events import Failed, ReasoningDelta, TextDelta, ToolCallFinished, ToolCallStarted
from tests.api.fakes import FIRST, FakeService, answer, hold

CALL = (ToolCallStarted(0, "call_1", "read"), ToolCallFinished(0, "call_1", "read", '{"path": "a"}'))
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def test_a_whole_answer_is_typed_and_continues_as_a_message(server: ApiServer, service: FakeService) -> None:
    service.script = lambda request: answer(ReasoningDelta("Hm."), TextDelta("Reading."), *CALL, finish="tool_calls")
    messages = [{"role": "user", "content": "Read a."}]
    first = server.direct(messages, tools=[TOOL], temperature=0)
    assert (first.text, first.reasoning, first.finish_reason, first.model) == ("Reading.", "Hm.", "tool_calls", "tiny")
    assert [(call.id, call.name, call.arguments) for call in first.tool_calls] == [("call_1", "read", '{"path": "a"}')]
    assert first.report.reused == 100 and first.usage.completion == 3
    result = {"role": "tool", "tool_call_id": "call_1", "content": "text of a"}
    server.direct([*messages, first.message, result])
    _, assistant, tool = service.requests[1].messages
    assert assistant.reasoning == "Hm." and assistant.tool_calls == first.tool_calls and tool.content == "text of a"
    assert service.requests[0].sampling.temperature == 0 and service.requests[0].client == "library"


def test_a_text_is_a_users_message_and_a_stream_yields_events(server: ApiServer, service: FakeService) -> None:
    stream = server.direct("Hi", stream=True)
    assert service.requests == []  # the first event begins it
    texts = [event.text for event in stream if isinstance(event, TextDelta)]
    assert texts == ["Hello", " there."] and stream.answer().text == "Hello there."
    assert service.requests[0].stream and service.requests[0].messages[0].content == "Hi"


def test_what_is_wrong_is_told_as_to_a_client(server: ApiServer, service: FakeService) -> None:
    with pytest.raises(BadRequest, match="top_p") as caught:
        server.direct("Hi", top_p=2)
    assert caught.value.param == "top_p"
    with pytest.raises(TypeError, match=r"takes no 'temprature'\. It takes: .*temperature"):
        typing.cast(Any, server.direct)("Hi", temprature=0)
    for wrong in (None, 5, b"Hi", ["Hi"], [None], {"role": "user"}):
        with pytest.raises(TypeError, match="messages: a text, or a list of messages"):
            server.direct(typing.cast(Any, wrong))
    with pytest.raises(TypeError, match=r"what JSON can hold: .*bytes"):
        server.direct([{"role": "user", "content": b"Hi"}])
    service.script = lambda request: [FIRST, Failed(StartLLMError("It broke."))]
    with pytest.raises(StartLLMError, match="It broke"):
        server.direct("Hi")


def test_a_stream_that_is_closed_ends_the_work_and_is_counted_as_gone(server: ApiServer, service: FakeService) -> None:
    service.script = lambda request: answer(TextDelta("Hello"), hold)
    with server.direct("Hi", stream=True) as stream:
        next(event for event in stream if isinstance(event, TextDelta))
    assert service.streams.get(timeout=20).closed.is_set()
    assert 'status="499"' in server.metrics.text().decode()
    with pytest.raises(ClientGone, match="before the answer's end"):
        stream.answer()


def test_the_page_can_cancel_it(server: ApiServer, service: FakeService) -> None:
    def cancel(stream: Any) -> None:
        assert server._watcher.cancel(service.requests[0].id)

    service.script = lambda request: answer(TextDelta("Hello"), cancel)
    with pytest.raises(Cancelled):
        server.direct("Hi")


def test_what_it_made_is_seen_again_by_who_may(serve: Callable[..., ApiServer], service: FakeService) -> None:
    server = serve(api_key="secret")
    made = server.direct("Hi")
    assert service.requests[0].id == made.id and 'dialect="chat"' in server.metrics.text().decode()
    listed = f"{server.url}/v1/cache/requests"
    assert httpx.get(listed).status_code == 401
    seen = httpx.get(listed, headers={"x-api-key": "secret"}).json()["requests"]
    assert [entry["id"] for entry in seen] == [made.id] and seen[0]["client"] == "library"


def test_without_a_key_who_sends_one_does_not_see_it(server: ApiServer) -> None:
    made = server.direct("Hi")
    listed = f"{server.url}/v1/cache/requests"
    assert httpx.get(listed, headers={"x-api-key": "other"}).json()["requests"] == []
    assert [entry["id"] for entry in httpx.get(listed).json()["requests"]] == [made.id]


def test_its_fields_are_those_of_the_route() -> None:
    left_out = {
        *("messages", "stream", "stream_options", "n", "best_of", "modalities", "metadata", "extra_body"),
        *("functions", "function_call", "max_completion_tokens", "logprobs", "top_logprobs"),
    }
    own = {"adapter", "enable_thinking", "reasoning_effort", "chat_template_kwargs", "session_id"}
    assert own <= OWN_FIELDS.keys()
    assert set(typing.get_type_hints(ChatFields)) == (set(ChatBody.model_fields) | own) - left_out
