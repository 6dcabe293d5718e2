"""Chat completions, the way out: events to chunks, a collected answer to a body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from start_llm.api.common.collect import Collected, CollectedChoice
from start_llm.api.http import sse
from start_llm.core.errors import StartLLMError
from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    FinishReason,
    Progress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import openai_error
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest

TokenText = Callable[[int], str]


def finish_word(reason: FinishReason) -> str:
    """OpenAI's word; an answer that was cut off by the watchdog ends like one that was too long."""
    return "length" if reason == "cancelled" else reason


def usage_body(usage: Usage, report: CacheReport) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        "start_llm": report.as_dict(),
    }


def logprobs_body(logprobs: Sequence[TokenLogprob], token_text: TokenText) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    return [
        entry(item.token, item.logprob) | {"top_logprobs": [entry(token, value) for token, value in item.top]}
        for item in logprobs
    ]


def call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_body(request: ChatRequest, created: int, result: Collected, token_text: TokenText) -> dict[str, Any]:
    """A ``chat.completion`` object."""
    return {
        "id": request.id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [_choice(request, index, choice, token_text) for index, choice in enumerate(result.choices)],
        "usage": usage_body(result.usage, result.report),
        "system_fingerprint": None,
    }


def _choice(request: ChatRequest, index: int, choice: CollectedChoice, token_text: TokenText) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call_body(call) for call in choice.calls]
    logprobs = None
    if request.logprobs is not None:
        logprobs = {"content": logprobs_body(choice.logprobs, token_text), "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_word(choice.finish_reason),
    }


class ChunkWriter(ABC):
    """What the streams of both older APIs share: signs of life, a usage chunk if asked for, ``[DONE]``."""

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage

    def write(self, event: Event) -> bytes:
        if isinstance(event, Progress):
            return sse.ping(event.done, event.total)
        if isinstance(event, Done):
            usage = {"usage": usage_body(event.usage, event.report)}
            return (sse.data(self._chunk([]) | usage) if self._include_usage else b"") + sse.DONE
        return self._piece(event)

    def fail(self, error: StartLLMError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE

    @abstractmethod
    def open(self) -> bytes: ...

    @abstractmethod
    def _piece(self, event: Event) -> bytes:
        """A piece of the answer; ``b""`` where the dialect says nothing."""

    @abstractmethod
    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]: ...


class ChatWriter(ChunkWriter):
    """``chat.completion.chunk`` events: one per event."""

    def __init__(self, request: ChatRequest, created: int, include_usage: bool, token_text: TokenText) -> None:
        super().__init__(include_usage)
        self._request, self._created, self._token_text = request, created, token_text

    def open(self) -> bytes:
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._request.n))

    def _piece(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._delta(event.choice, {"content": event.text}, logprobs=event.logprobs)
        if isinstance(event, ReasoningDelta):
            return self._delta(event.choice, {"reasoning_content": event.text})
        if isinstance(event, ToolCallStarted):
            call = {"index": event.index} | call_body(ToolCall(event.id, event.name, ""))
            return self._delta(event.choice, {"tool_calls": [call]})
        if isinstance(event, ToolCallDelta):
            piece = {"index": event.index, "function": {"arguments": event.arguments}}
            return self._delta(event.choice, {"tool_calls": [piece]})
        if isinstance(event, ChoiceDone):
            return self._delta(event.choice, {}, finish=finish_word(event.finish_reason))
        return b""

    def _delta(
        self, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: Sequence[TokenLogprob] = ()
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = {"content": logprobs_body(logprobs, self._token_text), "refusal": None}
        return sse.data(self._chunk([choice]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }
