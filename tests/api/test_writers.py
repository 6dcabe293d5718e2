"""For any sequence of events, what a dialect streams adds up to what it answers whole."""

from __future__ import annotations

import json
import re
from itertools import pairwise
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
from start_llm.core.protocol import thinking_signature
from start_llm.core.request import ChatRequest
from tests.api.fakes import DONE, FIRST, FakeService, exchange
from tests.vendors import anthropic_event, openai, openai_event

REQUEST = ChatRequest("id_1", "chat", "m", stream=True)
TEXT = st.text(st.sampled_from('\\"/\n\t😀é{}') | st.characters(codec="utf-8"), min_size=1, max_size=6)
OWN_TOOLS = [
    {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "custom", "name": "ask"}]},
    {"type": "custom", "name": "patch"},
]
NAMES = {
    "f": ("function_call", None, "f"),
    "patch": ("custom_tool_call", None, "patch"),
    "agents__ask": ("custom_tool_call", "agents", "ask"),
    "ask": ("custom_tool_call", "agents", "ask"),
}
"""What the model calls, and the client's own tool by the Responses API: of a custom one it sees the text alone."""


@st.composite
def turns(draw: st.DrawFn) -> list[Event]:
    """Reasoning, text, calls, in the order that models produce them, with signs of life anywhere."""
    events: list[Event] = [ReasoningDelta(text) for text in draw(st.lists(TEXT, max_size=3))]
    events += [TextDelta(text) for text in draw(st.lists(TEXT, max_size=3))]
    for index, value in enumerate(draw(st.lists(TEXT, max_size=3))):
        name = draw(st.sampled_from(sorted(NAMES)))
        arguments = json.dumps({"input": value}, ensure_ascii=draw(st.booleans()))
        places = [0, *sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=3))), len(arguments)]
        events.append(ToolCallStarted(index, f"call_{index}", name))
        events += [ToolCallDelta(index, arguments[begin:end]) for begin, end in pairwise(places)]
        events.append(ToolCallFinished(index, f"call_{index}", name, arguments))
    for place in draw(st.lists(st.integers(0, len(events)), max_size=3)):
        events.insert(place, Progress(1, 2))
    finish = draw(st.sampled_from(["stop", "length", "tool_calls", "cancelled"]))
    return [FIRST, *events, ChoiceDone(finish), DONE]


def said(events: list[Event]) -> tuple[str, str, list[ToolCallFinished], str]:
    """Reasoning, text, calls, why it ended."""
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    (end,) = (event for event in events if isinstance(event, ChoiceDone))
    return reasoning, text, [event for event in events if isinstance(event, ToolCallFinished)], end.finish_reason


def streamed(answering: Any, events: list[Event]) -> list[dict[str, Any]]:
    """What the stream's events hold; one with a name is of that type."""
    writer = answering.writer()
    data = writer.open() + b"".join(writer.write(event) for event in events)
    found = []
    for block in data.decode().split("\n\n"):
        name, is_data, sent = block.partition("data: ")
        if is_data and sent != "[DONE]":
            found.append(json.loads(sent))
            assert name == (f"event: {found[-1]['type']}\n" if "type" in found[-1] else "")
    return [item for item in found if item.get("type") != "ping"]


def whole(answering: Any, events: list[Event]) -> dict[str, Any]:
    return json.loads(answering.reply(iter(events)).body)  # type: ignore[no-any-return]


@given(turns(), st.booleans())
def test_chat(events: list[Event], wants_usage: bool) -> None:
    answering = OpenAIExchange(REQUEST, FakeService(), wants_usage, 0)
    body, chunks = whole(answering, events), streamed(answering, events)
    openai.types.chat.ChatCompletion.model_validate(body)
    content, reasoning, finish = "", "", None
    calls: dict[int, dict[str, Any]] = {}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            finish = choice["finish_reason"] or finish
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                kept = calls.setdefault(call["index"], call)
                if kept is not call:
                    kept["function"]["arguments"] += call["function"]["arguments"]
    message, (thought, text, made, end) = body["choices"][0]["message"], said(events)
    assert reasoning == message.get("reasoning_content", "") == thought
    assert content == (message["content"] or "") == text and (text or message["content"] == (None if made else ""))
    told = [call | {"index": index} for index, call in enumerate(message.get("tool_calls", []))]
    assert [*calls.values()] == told
    assert [(call["id"], *call["function"].values()) for call in told] == [(e.id, e.name, e.arguments) for e in made]
    assert finish == body["choices"][0]["finish_reason"] == {"cancelled": "length"}.get(end, end)
    usages = [(chunk["choices"], chunk["usage"]) for chunk in chunks if "usage" in chunk]
    assert usages == ([([], body["usage"])] if wants_usage else []) and "usage" not in chunks[-1 - wants_usage]


@given(turns())
def test_messages(events: list[Event]) -> None:
    answering = MessagesExchange(REQUEST, FakeService())
    body, found = whole(answering, events), streamed(answering, events)
    block = " content_block_start( content_block_delta)* content_block_stop"
    names = " ".join(event["type"] for event in found)
    assert re.fullmatch(f"message_start({block})* message_delta message_stop", names)
    blocks: list[dict[str, Any]] = []
    for event in found:
        anthropic_event().validate_python(event)
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[-1]
            for name in ("text", "thinking", "signature"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
        assert event.get("index", len(blocks) - 1) == len(blocks) - 1
    thought, text, made, _ = said(events)
    thinking = {"type": "thinking", "thinking": thought, "signature": thinking_signature(thought)}
    calls = [{"type": "tool_use", "id": e.id, "name": e.name, "input": json.loads(e.arguments)} for e in made]
    assert body["content"] == [*[thinking] * bool(thought), *[{"type": "text", "text": text}] * bool(text), *calls]
    for block, expected in zip(blocks, body["content"], strict=True):
        if expected["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
        assert expected.items() <= block.items()
    assert (found[-2]["delta"] | {"usage": found[-2]["usage"]}).items() <= body.items()
    assert found[0]["message"]["usage"]["cache_read_input_tokens"] == body["usage"]["cache_read_input_tokens"] == 100


TEXT_EVENTS = r"(\w+_part)\.added( \w+_text\.delta)+ \w+_text\.done \2\.done"
CALL_EVENTS = r"((?:function_call_arguments|custom_tool_call_input)\.)(delta \4)*done"
ITEM = rf"( output_item\.added (?:{TEXT_EVENTS}|{CALL_EVENTS}) output_item\.done)"


@given(turns(), st.sampled_from([None, "auto"]))
def test_responses(events: list[Event], summary: str | None) -> None:
    asked = {"store": False, "reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    answering = exchange("responses", **asked, tools=OWN_TOOLS)
    body, found = whole(answering, events), streamed(answering, events)
    openai.types.responses.Response.model_validate(body)
    names = " ".join(event["type"].removeprefix("response.") for event in found)
    assert re.fullmatch(rf"created in_progress{ITEM}* {body['status']}", names)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    final, done = found[-1]["response"], list[dict[str, Any]]()
    item, text = dict[str, Any](), ""
    for event in found:
        openai_event().validate_python(event)
        kind = event["type"].rpartition(".")[2]
        if "item" in event and kind == "added":
            item, text = event["item"], ""
        assert event.get("output_index", len(done)) == len(done)
        assert event.get("item_id", item.get("id")) == item.get("id")
        text += event.get("delta", "")
        if kind == "done" and "item" in event:
            same = ("id", "type", "role", "name", "namespace", "call_id")
            assert [item.get(name) for name in same] == [event["item"].get(name) for name in same]
            done.append(event["item"])
        elif kind == "done" and "part" not in event:
            assert text == event.get("text", event.get("arguments", event.get("input")))
    assert done == final["output"]
    assert [without_id(item) for item in done] == [without_id(item) for item in body["output"]]
    assert {**final, "output": []} == {**body, "output": []}
    thought, text, made, _ = said(events)
    shown = {"reasoning": thought, "message": text}
    for item in done[: -len(made) or None]:
        (part,) = item["summary" if summary and item["type"] == "reasoning" else "content"]
        assert part["text"] == shown.pop(item["type"])
    assert not any(shown.values())
    for item, call in zip(done[len(done) - len(made) :], made, strict=True):
        assert (item["type"], item.get("namespace"), item["name"]) == NAMES[call.name]
        written = call.arguments if call.name == "f" else json.loads(call.arguments)["input"]
        assert (item["call_id"], item.get("input", item.get("arguments"))) == (call.id, written)
    assert [tool["type"] for tool in body["tools"]] == ["namespace", "custom"]
    assert "start_llm_warnings" not in body["metadata"]


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}
