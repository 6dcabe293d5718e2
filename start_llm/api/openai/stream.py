"""Chat completions and completions, the way out: events to chunks, a collected answer to a body."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from start_llm.api.common.dialect import AnswerWriter, CollectedChoice, Exchange, TokenText, logprobs_body
from start_llm.api.http import sse
from start_llm.api.openai import shapes
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import openai_error
from start_llm.core.report import CacheReport

Finish = shapes.Finish
Choice = shapes.ChatChunkChoiceShape
Delta = shapes.ChatDeltaShape
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
    """A chat completion or a completion that is being answered. `created` is unix seconds."""

    include_usage: bool
    created: int

    def writer(self) -> ChunkWriter:
        return CompletionWriter(self) if self.request.dialect == "completions" else ChatWriter(self)


class ChunkWriter(AnswerWriter):
    """What the streams of both older APIs share: signs of life, a usage chunk if asked for, ``[DONE]``."""

    def __init__(self, exchange: OpenAIExchange) -> None:
        super().__init__(exchange.request.n * (1 + len(exchange.request.more_prompts)))
        self._exchange = exchange

    def _head(self) -> shapes.OlderPieceShape:
        asked = self._exchange.request
        return {"id": asked.id, "created": self._exchange.created, "model": asked.model}

    @abstractmethod
    def _chunk(self, choices: list[Any]) -> Mapping[str, object]:
        """A chunk of the stream."""

    def write(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.Progress):
            return sse.ping(event.done, event.total)
        if isinstance(event, ev.Done):
            last = {**self._chunk([]), "usage": usage_body(event.usage, event.report)}
            return (sse.data(last) if self._exchange.include_usage else b"") + sse.DONE
        return self._piece(event)

    def fail(self, error: StartLLMError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE

    @abstractmethod
    def _piece(self, event: ev.Event) -> bytes:
        """A piece of the answer; ``b""`` where the dialect says nothing."""


class ChatWriter(ChunkWriter):
    """One chunk per event."""

    def whole(self, done: ev.Done) -> shapes.ChatCompletionShape:
        return {
            **self._head(),
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(self.choices)],
            "usage": usage_body(done.usage, done.report),
            "system_fingerprint": None,
        }

    def _choice(self, index: int, choice: CollectedChoice) -> shapes.ChatChoiceShape:
        message: shapes.ChatMessageShape = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [call_body(call) for call in choice.calls]
        logprobs = None if self._exchange.request.logprobs is None else self._logprobs(choice.logprobs)
        finish = finish_word(choice.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, items: Sequence[ev.TokenLogprob]) -> shapes.ChatLogprobsShape:
        return {"content": logprobs_body(items, self._exchange.token_text), "refusal": None}

    def _chunk(self, choices: list[shapes.ChatChunkChoiceShape]) -> shapes.ChatChunkShape:
        return {**self._head(), "object": "chat.completion.chunk", "choices": choices}

    def open(self) -> bytes:
        choices = range(self._exchange.request.n)
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in choices)

    def _piece(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.TextDelta):
            return self._delta(event.choice, {"content": event.text}, logprobs=event.logprobs)
        if isinstance(event, ev.ReasoningDelta):
            return self._delta(event.choice, {"reasoning_content": event.text})
        if isinstance(event, ev.ToolCallStarted):
            begun = call_body(ToolCall(event.id, event.name, ""))
            return self._delta(event.choice, {"tool_calls": [{**begun, "index": event.index}]})
        if isinstance(event, ev.ToolCallDelta):
            piece: shapes.ChatCallPieceShape = {"index": event.index, "function": {"arguments": event.arguments}}
            return self._delta(event.choice, {"tool_calls": [piece]})
        if isinstance(event, ev.ChoiceDone):
            return self._delta(event.choice, {}, finish=finish_word(event.finish_reason))
        return b""

    def _delta(
        self, index: int, delta: Delta, *, finish: Finish | None = None, logprobs: Sequence[ev.TokenLogprob] = ()
    ) -> bytes:
        shown = self._logprobs(logprobs) if logprobs else None
        choice: Choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish}
        return sse.data(self._chunk([choice]))


# --- completions ---


def legacy_logprobs(items: Sequence[ev.TokenLogprob], token_text: TokenText, offset: int = 0) -> TextLogprobs:
    """The four parallel lists of ``/v1/completions``; `offset` is where the first token's text begins (characters)."""
    tokens = [token_text(item.token) if item.text is None else item.text for item in items]
    ends = accumulate(map(len, tokens), initial=offset)
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{token_text(token): value for token, value in item.top} for item in items],
        "text_offset": [begin for begin, _ in pairwise(ends)],
    }


class CompletionWriter(ChunkWriter):
    def __init__(self, exchange: OpenAIExchange) -> None:
        super().__init__(exchange)
        self._offsets = Counter[int]()  # characters of each choice so far

    def whole(self, done: ev.Done) -> shapes.TextCompletionShape:
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._chunk(choices), "usage": usage_body(done.usage, done.report)}

    def _choice(self, index: int, choice: CollectedChoice) -> shapes.TextChoiceShape:
        asked = self._exchange.request.logprobs is not None
        logprobs = legacy_logprobs(choice.logprobs, self._exchange.token_text) if asked else None
        finish = finish_word(choice.finish_reason)
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[shapes.TextChoiceShape]) -> shapes.TextCompletionShape:
        return {**self._head(), "object": "text_completion", "choices": choices}

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
        return sse.data(self._chunk([choice]))
