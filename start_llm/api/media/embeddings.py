"""``POST /v1/embeddings`` (OpenAI's) and ``/api/embed`` (Ollama's): an encoder's answers."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from start_llm.api.common.dialect import Task
from start_llm.api.common.fields import BodyModel, ModelName, bad, items_of, parse_body, within, wrong
from start_llm.api.common.parts import texts_of
from start_llm.api.common.request import counted_request
from start_llm.api.http import sse
from start_llm.api.http.access import RequestOwners
from start_llm.api.http.routes import Reply, Request
from start_llm.core.limits import EMBEDDED
from start_llm.core.media import Computation, Encoded, Text
from start_llm.core.request import ChatRequest
from start_llm.embeddings.service import EncoderService

CUT_HEADER = "x-start-llm-cut"
"""How many texts were too long and are known by their beginning only."""


class EmbeddingsBody(BodyModel):
    model: ModelName | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31)] | None = None
    truncate: bool | None = None
    user: str | None = None


class OllamaEmbedBody(BodyModel):
    model: str | None = None
    input: Any
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31)] | None = None


@dataclass(frozen=True, slots=True)
class Encodings:
    """Handlers of the routes."""

    encoders: EncoderService
    owners: RequestOwners

    def embeddings(self, inbound: Request) -> Task:
        body, data = parse_body(EmbeddingsBody, inbound.body)
        texts: list[Text] = []
        for path, text in texts_of(body.input, "input", EMBEDDED):
            if not text:
                raise wrong(path, "an empty text has no embedding.")
            texts.append(text)
        request = counted_request("embeddings", self.encoders.named(body.model or ""), data, inbound, self.owners)
        encoding = self.encoders.encode(texts, "input", truncate=bool(body.truncate), dimensions=body.dimensions)
        as_base64 = body.encoding_format == "base64"
        return _task(request, encoding, lambda found: _embeddings(request.model, found, as_base64))

    def ollama_embed(self, inbound: Request) -> Task:
        """A text that is too long is cut, as Ollama does, unless the body says no."""
        body, data = parse_body(OllamaEmbedBody, inbound.body)
        texts = [body.input] if isinstance(body.input, str) else [text for _, text in items_of(body.input, "input")]
        within(EMBEDDED, len(texts), "input")
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise bad(f"input[{index}]", "a text that is not empty", text)
        name = self.encoders.named((body.model or "").removesuffix(":latest"))
        request = counted_request("embeddings", name, data, inbound, self.owners)
        encoding = self.encoders.encode(texts, "input", truncate=body.truncate is not False, dimensions=body.dimensions)
        return _task(request, encoding, lambda found: _ollama_embeddings(request, found))


def _task(request: ChatRequest, encoding: Computation[Encoded], body: Callable[[Encoded], bytes]) -> Task:
    def answer(found: Encoded) -> Reply:
        return Reply(body(found), headers={CUT_HEADER: str(found.cut)} if found.cut else {})

    return Task(request, encoding, answer, tokens=lambda found: found.tokens)


def _embeddings(model: str, found: Encoded, as_base64: bool) -> bytes:
    """Made a vector at a time: a hundred thousand numbers in one go would hold up all other threads."""
    items = []
    for index, vector in enumerate(found.vectors):
        packed = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") if as_base64 else vector.tolist()
        items.append(sse.dumps({"object": "embedding", "index": index, "embedding": packed}))
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    tail = sse.dumps({"model": model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(items) + b"]," + tail[1:]


def _ollama_embeddings(request: ChatRequest, found: Encoded) -> bytes:
    vectors = b",".join(sse.dumps(vector.tolist()) for vector in found.vectors)
    took = int(max(0.0, time.monotonic() - request.received) * 1e9)
    counts = {"total_duration": took, "load_duration": 0, "prompt_eval_count": found.tokens}
    tail = sse.dumps({"model": request.model} | counts)
    return b'{"embeddings":[' + vectors + b"]," + tail[1:]
