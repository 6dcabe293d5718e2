"""Anthropic messages, the way out: the event sequence of the API, and the whole message."""

from __future__ import annotations

from typing import Any

from start_llm.api.common.dialect import Collected, Exchange, StreamWriter
from start_llm.api.http import sse
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.jsontext import parse_inner
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import anthropic_error, thinking_signature
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest


def stop_reason(reason: ev.FinishReason, stop_sequence: str | None) -> str:
    if stop_sequence is not None:
        return "stop_sequence"
    words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "max_tokens"}
    return words[reason]


def input_usage(prompt: int, cached: int, scale: float) -> dict[str, int]:
    """The three counts add up to the prompt. All that is computed is kept, so nothing is told apart as written."""
    total, read = scaled(prompt, scale), scaled(cached, scale)
    return {
        "input_tokens": max(0, total - read),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": read,
    }


def scaled(tokens: int, scale: float) -> int:
    return round(tokens * scale)


def usage_body(usage: ev.Usage, report: CacheReport, scale: float) -> dict[str, Any]:
    counts: dict[str, Any] = dict(input_usage(usage.prompt, usage.cached, scale))
    return counts | {
        "output_tokens": scaled(usage.completion, scale),
        "output_tokens_details": {"thinking_tokens": scaled(usage.reasoning, scale)},
        "start_llm": report.as_dict(),
    }


class MessagesExchange(Exchange):
    """A message that is being answered."""

    def scale(self) -> float:
        """What every count that the client is told is multiplied by; known once the model is loaded."""
        return self.service.context_scale(self.request.model)

    def body(self, result: Collected) -> dict[str, Any]:
        """A whole ``message``."""
        choice = result.choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            signature = thinking_signature(choice.reasoning)
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        content.extend(_tool_use(call) for call in choice.calls)
        return _message(self.request, content, usage_body(result.usage, result.report, self.scale())) | {
            "stop_reason": stop_reason(choice.finish_reason, choice.stop_sequence),
            "stop_sequence": choice.stop_sequence,
        }

    def writer(self) -> StreamWriter:
        return MessageWriter(self)


def _message(request: ChatRequest, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    try:
        given = parse_inner(call.arguments or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        given = {"arguments": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


class MessageWriter(StreamWriter):
    """``message_start`` ... ``message_stop``: one content block open at a time, blocks counted from 0.

    Before ``message_start`` signs of life are comments, since clients take no event before it.
    """

    def __init__(self, exchange: MessagesExchange) -> None:
        self._exchange = exchange
        self._started = False
        self._index = -1
        self._open: str | None = None
        self._thinking: list[str] = []
        self._stop: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}

    def write(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.Started):
            return self._start(event.report)
        if isinstance(event, ev.Progress):
            return sse.event("ping", {"type": "ping"}) if self._started else sse.ping(event.done, event.total)
        if isinstance(event, ev.Done):
            return self._end(event)
        if isinstance(event, ev.ChoiceDone):
            self._stop = {
                "stop_reason": stop_reason(event.finish_reason, event.stop_sequence),
                "stop_sequence": event.stop_sequence,
            }
            return self._close_block()
        return self._content(event)

    def fail(self, error: StartLLMError) -> bytes:
        return sse.event("error", anthropic_error(error))

    def _content(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.ReasoningDelta):
            head = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(event.text)
            return head + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, ev.TextDelta):
            if not event.text:
                return b""
            head = self._block("text", {"type": "text", "text": ""})
            return head + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, ev.ToolCallStarted):
            closed = self._close_block()
            return closed + self._block(
                "tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            )
        if isinstance(event, ev.ToolCallDelta):
            return self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        if isinstance(event, ev.ToolCallFinished):
            return self._close_block()
        return b""

    def _start(self, report: CacheReport) -> bytes:
        if self._started:
            return b""
        self._started = True
        usage = input_usage(report.prompt, report.reused, self._exchange.scale()) | {"output_tokens": 0}
        message = _message(self._exchange.request, [], usage)
        return sse.event("message_start", {"type": "message_start", "message": message})

    def _block(self, kind: str, block: dict[str, Any]) -> bytes:
        """Opens a block of this kind unless one is open."""
        if self._open == kind and kind != "tool_use":
            return b""
        head = self._start(CacheReport()) + self._close_block()
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return head + sse.event("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse.event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        last = b""
        if self._open == "thinking":
            signature = thinking_signature("".join(self._thinking))
            last = self._delta({"type": "signature_delta", "signature": signature})
            self._thinking = []
        self._open = None
        return last + sse.event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _end(self, done: ev.Done) -> bytes:
        head = self._start(done.report) + self._close_block()
        usage = usage_body(done.usage, done.report, self._exchange.scale())
        delta = sse.event("message_delta", {"type": "message_delta", "delta": self._stop, "usage": usage})
        return head + delta + sse.event("message_stop", {"type": "message_stop"})
