"""Chat completions and completions, the way out: events to chunks, a collected answer to a body."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from start_llm.api.common.dialect import Collected, CollectedChoice, Exchange, StreamWriter, TokenText, logprobs_body
from start_llm.api.http import sse
from start_llm.api.openai import shapes
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import openai_error
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest

Prompt = str | tuple[int, ...]
Finish = shapes.Finish
Delta = shapes.ChatDeltaShape
Piece = shapes.ChatCallPieceShape
TextLogprobs = shapes.TextLogprobsShape


def finish_word(reason: ev.FinishReason) -> Finish:
    """OpenAI's word; an answer that was cut off by the watchdog ends like one that was too long."""
    return "length" if reason == "cancelled" else reason


def usage_body(usage: ev.Usage, report: CacheReport) -> shapes.ChatUsageShape:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        "start_llm": report.as_dict(),
    }


def call_body(call: ToolCall) -> shapes.ChatCallShape:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(frozen=True, slots=True)
class OpenAIExchange(Exchange):
    """What both older APIs share. `created` is unix seconds."""

    include_usage: bool
    created: int

    @abstractmethod
    def chunk(self, choices: list[Any]) -> Mapping[str, object]:
        """A chunk of the stream."""


class ChatExchange(OpenAIExchange):
    """A chat completion that is being answered."""

    def body(self, result: Collected) -> shapes.ChatCompletionShape:
        return {
            "id": self.request.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.request.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(result.choices)],
            "usage": usage_body(result.usage, result.report),
            "system_fingerprint": None,
        }

    def _choice(self, index: int, choice: CollectedChoice) -> shapes.ChatChoiceShape:
        message: shapes.ChatMessageShape = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [call_body(call) for call in choice.calls]
        logprobs = None if self.request.logprobs is None else self.logprobs(choice.logprobs)
        finish = finish_word(choice.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, items: Sequence[ev.TokenLogprob]) -> shapes.ChatLogprobsShape:
        return {"content": logprobs_body(items, self.token_text), "refusal": None}

    def chunk(self, choices: list[shapes.ChatChunkChoiceShape]) -> shapes.ChatChunkShape:
        kind: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        asked, created = self.request, self.created
        return {"id": asked.id, "object": kind, "created": created, "model": asked.model, "choices": choices}

    def writer(self) -> StreamWriter:
        return ChatWriter(self)


class ChunkWriter[E: OpenAIExchange](StreamWriter):
    """What the streams of both older APIs share: signs of life, a usage chunk if asked for, ``[DONE]``."""

    def __init__(self, exchange: E) -> None:
        self._exchange = exchange

    def write(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.Progress):
            return sse.ping(event.done, event.total)
        if isinstance(event, ev.Done):
            last = {**self._exchange.chunk([]), "usage": usage_body(event.usage, event.report)}
            return (sse.data(last) if self._exchange.include_usage else b"") + sse.DONE
        return self._piece(event)

    def fail(self, error: StartLLMError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE

    @abstractmethod
    def _piece(self, event: ev.Event) -> bytes:
        """A piece of the answer; ``b""`` where the dialect says nothing."""


class ChatWriter(ChunkWriter[ChatExchange]):
    """One chunk per event."""

    def open(self) -> bytes:
        choices = range(self._exchange.request.n)
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in choices)

    def _piece(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.TextDelta):
            return self._delta(event.choice, {"content": event.text}, logprobs=event.logprobs)
        if isinstance(event, ev.ReasoningDelta):
            return self._delta(event.choice, {"reasoning_content": event.text})
        if isinstance(event, ev.ToolCallStarted):
            name: dict[Literal["name", "arguments"], str] = {"name": event.name, "arguments": ""}
            head: shapes.ChatCallPieceShape = {
                "index": event.index,
                "id": event.id,
                "type": "function",
                "function": name,
            }
            return self._delta(event.choice, {"tool_calls": [head]})
        if isinstance(event, ev.ToolCallDelta):
            piece: Piece = {"index": event.index, "function": {"arguments": event.arguments}}
            return self._delta(event.choice, {"tool_calls": [piece]})
        if isinstance(event, ev.ChoiceDone):
            return self._delta(event.choice, {}, finish=finish_word(event.finish_reason))
        return b""

    def _delta(
        self, index: int, delta: Delta, *, finish: Finish | None = None, logprobs: Sequence[ev.TokenLogprob] = ()
    ) -> bytes:
        shown = self._exchange.logprobs(logprobs) if logprobs else None
        return sse.data(
            self._exchange.chunk([{"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish}])
        )


# --- completions ---


@dataclass(frozen=True, slots=True)
class CompletionExchange(OpenAIExchange):
    """A completion that is being answered. The requests of its prompts differ in their id and prompt only."""

    prompts: tuple[Prompt, ...]

    @property
    def requests(self) -> tuple[ChatRequest, ...]:
        first, *others = self.prompts
        more = (replace(self.request, id=f"{self.request.id}-{i}", prompt=p) for i, p in enumerate(others, 1))
        return (replace(self.request, prompt=first), *more)

    def body(self, result: Collected) -> shapes.TextCompletionShape:
        choices = [self._choice(index, choice) for index, choice in enumerate(result.choices)]
        return {**self.chunk(choices), "usage": usage_body(result.usage, result.report)}

    def _choice(self, index: int, choice: CollectedChoice) -> shapes.TextChoiceShape:
        asked = self.request.logprobs is not None
        logprobs = legacy_logprobs(choice.logprobs, self.token_text) if asked else None
        finish = finish_word(choice.finish_reason)
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": finish}

    def chunk(self, choices: list[shapes.TextChoiceShape]) -> shapes.TextCompletionShape:
        kind: Literal["text_completion"] = "text_completion"
        asked, created = self.request, self.created
        return {"id": asked.id, "object": kind, "created": created, "model": asked.model, "choices": choices}

    def writer(self) -> StreamWriter:
        return CompletionWriter(self)


def legacy_logprobs(items: Sequence[ev.TokenLogprob], token_text: TokenText, offset: int = 0) -> TextLogprobs:
    """The four parallel lists of ``/v1/completions``; `offset` is where the first token's text begins (characters)."""
    tokens = [token_text(item.token) if item.text is None else item.text for item in items]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{token_text(token): value for token, value in item.top} for item in items],
        "text_offset": offsets,
    }


class CompletionWriter(ChunkWriter[CompletionExchange]):
    def __init__(self, exchange: CompletionExchange) -> None:
        super().__init__(exchange)
        self._offsets = Counter[int]()  # characters of each choice so far

    def _piece(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.TextDelta):
            logprobs = None
            if event.logprobs:
                logprobs = legacy_logprobs(event.logprobs, self._exchange.token_text, self._offsets[event.choice])
                self._offsets[event.choice] += sum(map(len, logprobs["tokens"]))
            return self._text(event.choice, event.text, logprobs)
        if isinstance(event, ev.ChoiceDone):
            return self._text(event.choice, "", finish=finish_word(event.finish_reason))
        return b""

    def _text(self, index: int, text: str, logprobs: TextLogprobs | None = None, finish: Finish | None = None) -> bytes:
        choice: shapes.TextChoiceShape = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return sse.data(self._exchange.chunk([choice]))
