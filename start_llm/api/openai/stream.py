"""Chat completions and completions, the way out: events to chunks, a collected answer to a body."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from start_llm.api.common.dialect import Collected, CollectedChoice, Exchange, StreamWriter, TokenText, logprobs_body
from start_llm.api.http import sse
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import openai_error
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest

Prompt = str | tuple[int, ...]


def finish_word(reason: ev.FinishReason) -> str:
    """OpenAI's word; an answer that was cut off by the watchdog ends like one that was too long."""
    return "length" if reason == "cancelled" else reason


def usage_body(usage: ev.Usage, report: CacheReport) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        "start_llm": report.as_dict(),
    }


def call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(frozen=True, slots=True)
class OpenAIExchange(Exchange):
    """What both older APIs share. `created` is unix seconds."""

    include_usage: bool
    created: int

    def head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of this kind, without its usage."""
        model = self.request.model
        return {"id": self.request.id, "object": kind, "created": self.created, "model": model, "choices": choices}


class ChatExchange(OpenAIExchange):
    """A chat completion that is being answered."""

    def body(self, result: Collected) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(result.choices)]
        usage = usage_body(result.usage, result.report)
        return self.head("chat.completion", choices) | {"usage": usage, "system_fingerprint": None}

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [call_body(call) for call in choice.calls]
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = {"content": logprobs_body(choice.logprobs, self.token_text), "refusal": None}
        finish = finish_word(choice.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def writer(self) -> StreamWriter:
        return ChatWriter(self)


class ChunkWriter(StreamWriter):
    """What the streams of both older APIs share: signs of life, a usage chunk if asked for, ``[DONE]``."""

    kind: str

    def __init__(self, exchange: OpenAIExchange) -> None:
        self._exchange = exchange

    def write(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.Progress):
            return sse.ping(event.done, event.total)
        if isinstance(event, ev.Done):
            usage = {"usage": usage_body(event.usage, event.report)}
            chunk = self._exchange.head(self.kind, []) | usage
            return (sse.data(chunk) if self._exchange.include_usage else b"") + sse.DONE
        return self._piece(event)

    def fail(self, error: StartLLMError) -> bytes:
        return sse.data(openai_error(error)) + sse.DONE

    @abstractmethod
    def _piece(self, event: ev.Event) -> bytes:
        """A piece of the answer; ``b""`` where the dialect says nothing."""

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse.data(self._exchange.head(self.kind, [choice]))


class ChatWriter(ChunkWriter):
    """One chunk per event."""

    kind = "chat.completion.chunk"

    def open(self) -> bytes:
        choices = range(self._exchange.request.n)
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in choices)

    def _piece(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.TextDelta):
            return self._delta(event.choice, {"content": event.text}, logprobs=event.logprobs)
        if isinstance(event, ev.ReasoningDelta):
            return self._delta(event.choice, {"reasoning_content": event.text})
        if isinstance(event, ev.ToolCallStarted):
            call = {"index": event.index} | call_body(ToolCall(event.id, event.name, ""))
            return self._delta(event.choice, {"tool_calls": [call]})
        if isinstance(event, ev.ToolCallDelta):
            piece = {"index": event.index, "function": {"arguments": event.arguments}}
            return self._delta(event.choice, {"tool_calls": [piece]})
        if isinstance(event, ev.ChoiceDone):
            return self._delta(event.choice, {}, finish=finish_word(event.finish_reason))
        return b""

    def _delta(
        self, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: Sequence[ev.TokenLogprob] = ()
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = {"content": logprobs_body(logprobs, self._exchange.token_text), "refusal": None}
        return self._chunk(choice)


# --- completions ---


@dataclass(frozen=True, slots=True)
class CompletionExchange(OpenAIExchange):
    """A completion that is being answered. The requests of its prompts differ in their id and prompt only.

    `echo`: the prompts' texts where the client wants them back, else one ``""`` a prompt.
    """

    prompts: tuple[Prompt, ...]
    echo: tuple[str, ...]

    @property
    def requests(self) -> tuple[ChatRequest, ...]:
        first, *others = self.prompts
        more = (replace(self.request, id=f"{self.request.id}-{i}", prompt=p) for i, p in enumerate(others, 1))
        return (replace(self.request, prompt=first), *more)

    def echo_of(self, choice: int) -> str:
        return self.echo[choice // self.request.n]

    def body(self, result: Collected) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(result.choices):
            text, echo = choice.text, self.echo_of(index)
            logprobs = None
            if self.request.logprobs is not None:
                logprobs = legacy_logprobs(choice.logprobs, self.token_text, len(echo))
            choices.append(_text_choice(index, echo + text, logprobs, finish_word(choice.finish_reason)))
        return self.head("text_completion", choices) | {"usage": usage_body(result.usage, result.report)}

    def writer(self) -> StreamWriter:
        return CompletionWriter(self)


def legacy_logprobs(items: Sequence[ev.TokenLogprob], token_text: TokenText, offset: int = 0) -> dict[str, Any]:
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


def _text_choice(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class CompletionWriter(ChunkWriter):
    kind = "text_completion"
    _exchange: CompletionExchange

    def __init__(self, exchange: CompletionExchange) -> None:
        super().__init__(exchange)
        self._choices = range(exchange.request.n * len(exchange.prompts))
        self._offsets = [len(exchange.echo_of(index)) for index in self._choices]

    def open(self) -> bytes:
        echoes = [(index, self._exchange.echo_of(index)) for index in self._choices]
        return b"".join(self._text(index, echo) for index, echo in echoes if echo)

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

    def _text(self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None) -> bytes:
        return self._chunk(_text_choice(index, text, logprobs, finish))
