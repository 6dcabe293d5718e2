"""For any sequence of events, what a dialect streams adds up to what it answers whole."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from start_llm.api.anthropic.messages import MessagesExchange
from start_llm.api.openai.stream import OpenAIExchange
from start_llm.core.events import (
    ChoiceDone,
    Event,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from start_llm.core.request import ChatRequest
from tests.api.fakes import DONE, FIRST, FakeService, exchange
from tests.vendors import anthropic_event, openai, openai_event

REQUEST = ChatRequest("id_1", "chat", "m", stream=True)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> list[Event]:
    """Reasoning, text, calls, in the order that models produce them, with signs of life anywhere."""
    events: list[Event] = [ReasoningDelta(text) for text in draw(st.lists(TEXT, max_size=3))]
    events += [TextDelta(text) for text in draw(st.lists(TEXT, max_size=3))]
    for index, value in enumerate(draw(st.lists(TEXT, max_size=3))):
        arguments = json.dumps({"v": value})
        cut = draw(st.integers(0, len(arguments)))
        events.append(ToolCallStarted(index, f"call_{index}", "f"))
        events += [ToolCallDelta(index, piece) for piece in (arguments[:cut], arguments[cut:]) if piece]
        events.append(ToolCallFinished(index, f"call_{index}", "f", arguments))
    for place in draw(st.lists(st.integers(0, len(events)), max_size=3)):
        events.insert(place, Progress(1, 2))
    finish = draw(st.sampled_from(["stop", "length", "tool_calls", "cancelled"]))
    return [FIRST, *events, ChoiceDone(finish), DONE]


def streamed(answering: Any, events: list[Event]) -> list[dict[str, Any]]:
    writer = answering.writer()
    data = writer.open() + b"".join(writer.write(event) for event in events)
    found = []
    for block in data.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(json.loads(line.removeprefix("data: ")))
    return [item for item in found if item.get("type") != "ping"]


def whole(answering: Any, events: list[Event]) -> dict[str, Any]:
    return json.loads(answering.reply(iter(events)).body)  # type: ignore[no-any-return]


@given(turns())
def test_chat(events: list[Event]) -> None:
    answering = OpenAIExchange(REQUEST, FakeService(), True, 0)
    body = whole(answering, events)
    openai.types.chat.ChatCompletion.model_validate(body)
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    finish, usage = None, None
    for chunk in streamed(answering, events):
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            finish = choice["finish_reason"] or finish
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                kept = calls.setdefault(call["index"], {"id": call.get("id"), "arguments": ""})
                kept["arguments"] += call["function"]["arguments"]
    message = body["choices"][0]["message"]
    assert content == (message["content"] or "")
    assert reasoning == message.get("reasoning_content", "")
    assert [(call["id"], call["arguments"]) for call in calls.values()] == [
        (call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    assert (finish, usage) == (body["choices"][0]["finish_reason"], body["usage"])


@given(turns())
def test_messages(events: list[Event]) -> None:
    answering = MessagesExchange(REQUEST, FakeService())
    body = whole(answering, events)
    blocks: list[dict[str, Any]] = []
    stop: dict[str, Any] = {}
    for event in streamed(answering, events):
        anthropic_event().validate_python(event)
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
            assert event["index"] == len(blocks) - 1
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for name in ("text", "thinking", "signature"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            stop = event["delta"] | {"usage": event["usage"]}
    assert len(blocks) == len(body["content"])
    for block, expected in zip(blocks, body["content"], strict=True):
        if expected["type"] == "tool_use":
            assert json.loads(block["json"]) == expected["input"]
        else:
            assert expected.items() <= block.items()
    assert stop.items() <= body.items()


@given(turns(), st.sampled_from([None, "auto"]))
def test_responses(events: list[Event], summary: str | None) -> None:
    asked = {"store": False, "reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    answering = exchange("responses", **asked)
    body = whole(answering, events)
    openai.types.responses.Response.model_validate(body)
    found = streamed(answering, events)
    for event in found:
        openai_event().validate_python(event)
    final = found[-1]["response"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [without_id(item) for item in final["output"]] == [without_id(item) for item in body["output"]]
    assert {**final, "output": []} == {**body, "output": []}
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == final["output"]


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}
