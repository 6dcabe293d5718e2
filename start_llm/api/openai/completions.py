"""``POST /v1/completions``: raw prompts, OpenAI's older API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from start_llm.api.common.dialect import Collected, StreamWriter
from start_llm.api.common.fields import parse_body
from start_llm.api.common.parts import texts_of
from start_llm.api.common.request import request_of, stop_of
from start_llm.api.http.routes import Request
from start_llm.api.openai.chat import OlderBody
from start_llm.api.openai.stream import ChunkWriter, OpenAIExchange, TokenText, finish_word, usage_body
from start_llm.core.errors import NotSupported
from start_llm.core.events import ChoiceDone, Event, TextDelta, TokenLogprob
from start_llm.core.limits import PROMPTS
from start_llm.core.request import ChatRequest
from start_llm.core.service import Service
from start_llm.core.settings import Settings

Prompt = str | tuple[int, ...]


class CompletionBody(OlderBody):
    prompt: Any = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


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
            choices.append(_choice(index, echo + text, logprobs, finish_word(choice.finish_reason)))
        return self.head("text_completion", choices) | {"usage": usage_body(result.usage, result.report)}

    def writer(self) -> StreamWriter:
        return CompletionWriter(self)


def read_completion(inbound: Request, settings: Settings, service: Service) -> CompletionExchange:
    """Raises BadRequest, NotSupported."""
    body, data = parse_body(CompletionBody, inbound.body)
    if body.suffix:
        raise NotSupported("suffix: text after the answer is not supported; leave it out.", param="suffix")
    choices = body.choices()
    prompts = tuple(prompt for _, prompt in texts_of(body.prompt, "prompt", PROMPTS))
    request = request_of(
        *("completions", body, data, inbound, settings),
        prompt=prompts[0],
        max_tokens=body.max_tokens,
        stop=stop_of(body.stop),
        n=choices,
        logprobs=body.logprobs,
    )
    # Echoed token ids are read as text here, in the vocabulary of the model that the body names.
    echo = tuple(_text(prompt, request.model, service) if body.echo else "" for prompt in prompts)
    return CompletionExchange(request, service, body.includes_usage, int(time.time()), prompts, echo)


def _text(prompt: Prompt, model: str, service: Service) -> str:
    return prompt if isinstance(prompt, str) else "".join(service.token_text(token, model) for token in prompt)


def legacy_logprobs(items: Sequence[TokenLogprob], token_text: TokenText, offset: int = 0) -> dict[str, Any]:
    """The four parallel lists of this API; `offset` is where the first token's text begins, in characters."""
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


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
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

    def _piece(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            logprobs = None
            if event.logprobs:
                logprobs = legacy_logprobs(event.logprobs, self._exchange.token_text, self._offsets[event.choice])
                self._offsets[event.choice] += sum(map(len, logprobs["tokens"]))
            return self._text(event.choice, event.text, logprobs)
        if isinstance(event, ChoiceDone):
            return self._text(event.choice, "", finish=finish_word(event.finish_reason))
        return b""

    def _text(self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None) -> bytes:
        return self._chunk(_choice(index, text, logprobs, finish))
