"""One fixed answer in each dialect: a piece of reasoning, a text and, where the request brings tools, a call of the
first one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from start_llm.core.service import ModelCard

REASONING = "Two and two."
TEXT = "It is four."
ARGUMENTS = '{"path": "a.txt"}'
PATCH = "*** Begin Patch"
CARD = ModelCard("served", 1_700_000_000, 8192)
UNKNOWN = "model='nobody/nothing': this server serves 'served', 'small'."
HEADER = "prompt=12; reused=8; computed=4; new=4"
REPORT = {"prompt": 12, "reused": 8, "computed": 4, "new": 4}
CHAT_USAGE = {
    "prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 8},
    "start_llm": REPORT,
}  # fmt: skip
MESSAGES_USAGE = {
    "input_tokens": 4, "output_tokens": 5, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0,
    "start_llm": REPORT,
}  # fmt: skip
RESPONSES_USAGE = {
    "input_tokens": 12, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 17, "start_llm": REPORT,
}  # fmt: skip


def send_json(handler: BaseHTTPRequestHandler, body: Any, status: int = 200, **headers: str) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "x-start-llm-cache": HEADER, **headers}.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


# --- chat completions ---------------------------------------------------------


def _chat_calls(body: dict[str, Any]) -> list[dict[str, Any]]:
    if not body.get("tools"):
        return []
    name = body["tools"][0]["function"]["name"]
    return [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}]


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    calls = _chat_calls(body)
    message: dict[str, Any] = {"role": "assistant", "content": TEXT, "reasoning_content": REASONING}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {"choices": [choice], "usage": CHAT_USAGE} | _chat_head(body, "chat.completion")


def chat_events(body: dict[str, Any]) -> Iterator[tuple[None, dict[str, Any] | str]]:
    head = _chat_head(body, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> tuple[None, dict[str, Any]]:
        return None, head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    yield chunk({"reasoning_content": REASONING})
    yield chunk({"content": TEXT})
    calls = _chat_calls(body)
    for index, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": index} | call]})
    yield chunk({}, "tool_calls" if calls else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, head | {"choices": [], "usage": CHAT_USAGE}
    yield None, "[DONE]"


def _chat_head(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}


# --- messages -----------------------------------------------------------------


def messages_blocks(body: dict[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": REASONING, "signature": "s"},
        {"type": "text", "text": TEXT},
    ]
    if body.get("tools"):
        call = {"type": "tool_use", "id": "toolu_1", "name": body["tools"][0]["name"], "input": json.loads(ARGUMENTS)}
        blocks.append(call)
    return blocks


def messages_body(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "usage": MESSAGES_USAGE,
        "content": messages_blocks(body), "stop_reason": "tool_use" if body.get("tools") else "end_turn",
        "stop_sequence": None,
    }  # fmt: skip


def messages_events(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = messages_body(body)
    start = whole | {"content": [], "stop_reason": None, "usage": MESSAGES_USAGE | {"output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": start}
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        empty: dict[str, Any] = {
            "thinking": {"thinking": "", "signature": ""},
            "text": {"text": ""},
            "tool_use": {"input": {}},
        }
        deltas = {
            "thinking": [("thinking_delta", "thinking", REASONING), ("signature_delta", "signature", "s")],
            "text": [("text_delta", "text", TEXT)],
            "tool_use": [("input_json_delta", "partial_json", ARGUMENTS)],
        }
        begun = block | empty[kind]
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": begun}
        for delta, name, value in deltas[kind]:
            told = {"type": delta, name: value}
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": told}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": stop, "usage": MESSAGES_USAGE}
    yield "message_stop", {"type": "message_stop"}


# --- responses ----------------------------------------------------------------


def responses_items(body: dict[str, Any]) -> list[dict[str, Any]]:
    text = {"type": "output_text", "text": TEXT, "annotations": []}
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": REASONING}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
    ]
    functions = [tool for tool in body.get("tools") or [] if tool["type"] == "function"]
    if functions:
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed"}
        items.append(call | {"name": functions[0]["name"], "arguments": ARGUMENTS})
    for tool in body.get("tools") or []:
        if tool["type"] == "namespace":
            call = {"type": "function_call", "id": "fc_2", "call_id": "call_2", "status": "completed"}
            items.append(call | {"namespace": tool["name"], "name": tool["tools"][0]["name"], "arguments": ARGUMENTS})
        elif tool["type"] == "custom":
            call = {"type": "custom_tool_call", "id": "ctc_3", "call_id": "call_3", "status": "completed"}
            items.append(call | {"name": tool["name"], "input": PATCH})
    return items


def responses_body(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": body["model"],
        "output": responses_items(body), "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": body.get("tools") or [], "usage": RESPONSES_USAGE,
    }  # fmt: skip


def responses_events(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = responses_body(body)
    number = 0

    def event(kind: str, **data: Any) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number - 1} | data

    yield event("response.created", response=whole | {"status": "in_progress", "output": [], "usage": None})
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        yield event("response.output_item.added", output_index=index, item=item | {"status": "in_progress"})
        if item["type"] == "message":
            yield event("response.output_text.delta", content_index=0, delta=TEXT, **place)
            yield event("response.output_text.done", content_index=0, text=TEXT, **place)
        elif item["type"] == "reasoning":
            yield event("response.reasoning_summary_text.delta", summary_index=0, delta=REASONING, **place)
        elif item["type"] == "custom_tool_call":
            yield event("response.custom_tool_call_input.delta", delta=PATCH, **place)
            yield event("response.custom_tool_call_input.done", input=PATCH, **place)
        else:
            yield event("response.function_call_arguments.delta", delta=ARGUMENTS, **place)
            yield event("response.function_call_arguments.done", arguments=ARGUMENTS, **place)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=whole)
