"""Ollama's API: what its clients send becomes a request, and events become its lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from start_llm.api.server import ApiServer
from start_llm.core.errors import TimedOut
from start_llm.core.events import (
    ChoiceDone,
    Failed,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from tests.api.conftest import Connect, Raw, Serve
from tests.api.fakes import DONE, FIRST, USER, FakeService, answer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def called(arguments: str) -> list[Any]:
    return answer(
        ReasoningDelta("Hm."),
        TextDelta("I look."),
        ToolCallStarted(0, "c1", "f"),
        ToolCallDelta(0, arguments),
        ToolCallFinished(0, "c1", "f", arguments),
        finish="tool_calls",
    )


Ask = Callable[[str, dict[str, Any]], tuple[int, dict[str, str], list[Any]]]


@pytest.fixture
def ask(server: ApiServer, connect: Connect) -> Ask:
    """Status, headers and lines."""

    def asked(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], list[Any]]:
        status, headers, sent = connect(server).post(path, body).response()
        return status, headers, [json.loads(line) for line in sent.splitlines()]

    return asked


def test_silence_means_a_stream_of_lines(ask: Ask) -> None:
    status, headers, lines = ask("/api/chat", {"model": "tiny:latest", "messages": USER})
    assert status == 200 and headers["content-type"] == "application/x-ndjson" and "x-start-llm-cache" in headers
    assert [line["message"]["content"] for line in lines] == ["Hello", " there.", ""]
    assert [line["done"] for line in lines] == [False, False, True]
    last = lines[-1]
    assert last["done_reason"] == "stop" and last["model"] == "tiny"
    assert last["prompt_eval_count"] == 120 and last["eval_count"] == 3 and last["total_duration"] > 0
    assert last["start_llm"]["reused"] == 100


def test_thinking_and_calls_are_whole_in_a_stream_and_in_one_answer(ask: Ask, service: FakeService) -> None:
    service.script = lambda request: called('{"a": 1}')
    body = {"model": "tiny", "messages": USER, "tools": [TOOL], "think": "high"}
    _, _, lines = ask("/api/chat", body)
    _, _, (whole,) = ask("/api/chat", body | {"stream": False})
    call = {"id": "c1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}
    assert [line["message"]["thinking"] for line in lines if "thinking" in line["message"]] == ["Hm."]
    assert [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]] == [[call]]
    message = {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": [call]}
    assert whole["message"] == message and whole["done"] is True and whole["done_reason"] == "stop"
    request = service.requests[0]
    assert request.dialect == "ollama" and request.thinking is True and request.reasoning_effort == "high"
    assert request.stream and not service.requests[1].stream and request.tools[0].name == "f"


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [("{", {"arguments": "{"}), ("[5]", {"arguments": "[5]"}), ('{"a": 1e400}', {"arguments": '{"a": 1e400}'})],
)
def test_arguments_that_are_no_object_are_not_lost(arguments: str, sent: Any, ask: Ask, service: FakeService) -> None:
    service.script = lambda request: called(arguments)
    _, _, (whole,) = ask("/api/chat", {"messages": USER, "stream": False})
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == sent


def test_messages_keep_their_order_and_results_find_their_calls(ask: Ask, service: FakeService) -> None:
    calls = [{"function": {"name": name, "arguments": {"x": "é"}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "content": text, "tool_name": text[0]} for text in ("g1", "f1", "f2")]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "see", "images": ["aGk=", "aGs="]},
        {"role": "assistant", "content": "", "thinking": "T", "tool_calls": calls},
        *results,
        {"role": "tool", "content": "left over"},
    ]
    assert ask("/api/chat", {"messages": messages})[0] == 200
    system, user, assistant, *told = service.requests[0].messages
    assert (system.role, system.content) == ("system", "S")
    assert [image.source for image in user.attachments] == ["aGk=", "aGs="]
    assert user.attachments[1].path == "messages[1].images[1]"
    first, other, second = assistant.tool_calls
    assert assistant.reasoning == "T" and json.loads(first.arguments) == {"x": "é"}
    assert [message.tool_call_id for message in told] == [other.id, first.id, second.id, None]


def test_probabilities_are_told_where_they_are_asked_for(ask: Ask, service: FakeService) -> None:
    token = TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.0)))
    service.script = lambda request: [FIRST, TextDelta("a", 0, (token,)), ChoiceDone("length"), DONE]
    for path, asked in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "Hi"})):
        for stream in (False, True):
            body = asked | {"logprobs": True, "top_logprobs": 2, "stream": stream}
            lines = ask(path, body)[2]
            (entry,) = lines[0]["logprobs"]
            assert lines[-1]["done_reason"] == "length"
            assert (entry["token"], entry["logprob"], entry["top_logprobs"][1]["token"]) == ("<7>", -0.5, "<8>")
            assert service.requests[-1].logprobs == 2
    ask("/api/chat", {"messages": USER, "top_logprobs": 2})
    assert service.requests[-1].logprobs is None


def test_a_single_prompt_with_its_system_text_and_a_raw_one(ask: Ask, service: FakeService) -> None:
    body = {"model": "tiny", "prompt": "Hi", "system": "S", "images": ["aGk="], "stream": False}
    _, _, (whole,) = ask("/api/generate", body)
    assert whole["response"] == "Hello there." and whole["done"] is True and "message" not in whole
    system, user = service.requests[0].messages
    assert (system.content, user.content, len(user.attachments)) == ("S", "Hi", 1)
    _, _, lines = ask("/api/generate", {"prompt": "Once", "raw": True})
    assert [line["response"] for line in lines] == ["Hello", " there.", ""]
    assert service.requests[1].dialect == "completions" and service.requests[1].prompt == "Once"


def test_no_question_loads_the_model_or_unloads_it(ask: Ask, service: FakeService) -> None:
    for path, empty in (("/api/generate", "response"), ("/api/chat", "message")):
        for more, word in (({}, "load"), ({"keep_alive": 0}, "unload")):
            _, _, (said,) = ask(path, {"model": "tiny"} | more)
            assert said["done_reason"] == word and said["done"] is True and empty in said
            assert service.acts[-1] == f"{word} tiny"
    assert not service.requests
    status, _, (said,) = ask("/api/generate", {"model": "nobody"})
    assert status == 404 and set(said) == {"error"} and "nobody" in said["error"]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("who", [{"Authorization": "Bearer mine"}, {"Origin": "http://localhost:1"}])
def test_who_may_not_see_everything_unloads_nothing(path: str, who: dict[str, str], server: ApiServer) -> None:
    """Everybody would wait for the model to be loaded again."""
    answered = httpx.post(server.url + path, json={"model": "tiny", "keep_alive": 0}, headers=who, timeout=20)
    assert answered.status_code == 403


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/chat", {"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
        ("/api/chat", {"messages": USER, "options": {"top_p": 5}}, "options.top_p"),
        ("/api/chat", {"messages": USER, "options": {"top_k": 1.5}}, "options.top_k"),
        ("/api/chat", {"messages": USER, "options": {"stop": 5}}, "options.stop"),
        ("/api/chat", {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat: "),
        ("/api/chat", {"messages": USER, "options": {"logit_bias": {"a": 1}}}, "options.logit_bias.a"),
        ("/api/chat", {"messages": USER, "format": "xml"}, "format"),
        ("/api/chat", {"messages": USER, "think": "so"}, "think"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "function.name"),
        ("/api/chat", {"messages": USER, "tools": [TOOL, TOOL]}, "tools[1]"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/show", {}, "model"),
        ("/api/show", {"model": "nobody"}, "nobody"),
    ],
)
def test_errors_are_one_sentence_in_ollamas_shape(path: str, body: Any, says: str, ask: Ask) -> None:
    status, _, (said,) = ask(path, body)
    assert status in {400, 404, 501} and set(said) == {"error"} and says in said["error"]


def test_a_failure_in_the_stream_is_a_line(ask: Ask, service: FakeService) -> None:
    service.script = lambda request: [FIRST, TextDelta("a"), Failed(TimedOut("It took too long."))]
    status, _, lines = ask("/api/chat", {"messages": USER})
    assert status == 200 and lines[-1] == {"error": "It took too long."}


def test_what_there_is(server: ApiServer, connect: Connect, ask: Ask) -> None:
    def get(path: str) -> Any:
        return json.loads(connect(server).get(path).response()[2])

    (listed,), (loaded,) = get("/api/tags")["models"], get("/api/ps")["models"]
    assert listed["name"] == listed["model"] == "tiny" and len(listed["digest"]) == 64
    assert loaded["context_length"] == 4096 and listed.items() <= loaded.items()
    assert {"version", "start_llm"} <= get("/api/version").keys()
    _, _, (shown,) = ask("/api/show", {"model": "tiny:latest"})
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["generic.context_length"] == 4096


def test_ollamas_port_is_a_second_one(serve: Serve) -> None:
    server = serve(ollama_port=0)
    second = server._front._listeners[1]._listener.getsockname()[1]
    assert second != server.port
    raw = Raw(second)
    assert raw.get("/api/version").response()[0] == 200
    raw.close()
