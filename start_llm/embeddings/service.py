"""Texts to vectors, top to bottom: names, tokens, batches, steps on the model thread. Runs on HTTP threads.

An encoder is a model of the pool that is loaded at its first request and stays. Its weights are counted at the start of
the server already, so that what KV may take is true from the beginning.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from start_llm.chat.handle import Lease, loaded
from start_llm.core.errors import BadRequest, ContextLengthExceeded, NotFound, NotSupported, StartLLMError, Unavailable
from start_llm.core.events import Progress
from start_llm.core.extras import check_installed
from start_llm.core.limits import EMBEDDED_TOKENS
from start_llm.core.media import Computation, Encoded, Text
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.embeddings.checkpoint import EncoderFiles, read_encoder, whole_encoder
from start_llm.embeddings.compute import LIBRARY, Encoder
from start_llm.engine.thread import EngineThread
from start_llm.models.pull import find_folder

CHARACTERS = 64  # a text that has more of them for each token that it may have is not counted
# Names that clients are hard-wired to.
_FOREIGN_NAMES = re.compile(r"text-embedding-[\w.-]*$")


class EncoderService:
    """Thread-safe; called on HTTP threads. `open_encoder`: see `modelpool.pool.Pool`."""

    def __init__(
        self, settings: Settings, open_encoder: Callable[[str, Path], Lease[Encoder]], thread: EngineThread
    ) -> None:
        self._source = settings.embedding_model
        self._open_encoder = open_encoder
        self._thread = thread
        self._files: EncoderFiles | None = None
        self._created = int(time.time())
        self._dimensions: int | None = None  # known once it is loaded
        self._problem: StartLLMError | None = None
        self._texts = self._tokens = 0
        self._counting = threading.Lock()

    def prepare(self, progress: Callable[[str, float], None]) -> int:
        """Finds the files, fetches them if need be; once, before any request.

        Returns the bytes that the weights will take. 0: there is no encoder, or it cannot be used; see `problem`.
        """
        if self._source is None:
            return 0
        try:
            check_installed(LIBRARY)
            folder = find_folder(self._source, "EMBEDDING_MODEL", progress, whole_encoder)
            self._files = read_encoder(self._source, folder)
        except StartLLMError as error:
            self._problem = error.again()
            return 0
        return self._files.weight_bytes

    @property
    def problem(self) -> str:
        """Why there are no embeddings although EMBEDDING_MODEL is set; empty: there are."""
        return "" if self._problem is None else self._problem.message

    def named(self, asked: str) -> str:
        """The name of the encoder that `asked` means. Raises NotFound, NotSupported."""
        files = self._known()
        own = {"", "default", "embedding", files.name, self._source, f"openai/{files.name}", f"openai/{self._source}"}
        if asked in own or _FOREIGN_NAMES.match(asked.rsplit("/", 1)[-1]):
            return files.name
        message = f"model={asked[:200]!r}: the embedding model of this server is {files.name!r}."
        raise NotFound(message, param="model", code="model_not_found")

    def encode(
        self, texts: Sequence[Text], param: str, *, truncate: bool, dimensions: int | None
    ) -> Computation[Encoded]:
        """Checks the texts; the iteration computes. Raises BadRequest, NotSupported, Unavailable, OutOfMemory.

        `param`: the request's field that holds the texts, for errors. `dimensions`: the first so many of the model's,
        brought to length 1 again; ``None``: all.
        """
        files = self._known()
        rows, cut, total = [], 0, 0
        for index, text in enumerate(texts):
            row, whole = _row(files, text, f"{param}[{index}]", truncate=truncate)
            rows.append(row)
            cut, total = cut + (not whole), total + len(row)
            if total > EMBEDDED_TOKENS.most:
                first = f"the first {index + 1} of {len(texts)} texts have {total}; send fewer texts at a time."
                allowed = f"{param}: at most {EMBEDDED_TOKENS.most} tokens are allowed in one request"
                raise BadRequest(f"{allowed}, and {first}", param=param, code="limit_exceeded")
        with loaded(self._open_encoder(files.name, files.folder), files.name) as encoder:
            self._dimensions = encoder.dimensions
        if dimensions is not None and not 1 <= dimensions <= encoder.dimensions:
            allowed = f"{files.name} makes vectors of {encoder.dimensions}; give 1 to {encoder.dimensions}."
            raise BadRequest(f"dimensions={dimensions}: {allowed}", param="dimensions")
        with self._counting:
            self._texts, self._tokens = self._texts + len(rows), self._tokens + total
        return self._batches(rows, cut, encoder, dimensions or encoder.dimensions)

    def _batches(
        self, rows: Sequence[tuple[int, ...]], cut: int, encoder: Encoder, dimensions: int
    ) -> Computation[Encoded]:
        """Texts of about the same length share a step."""
        found, done = Encoded(np.zeros((len(rows), dimensions), np.float32), sum(map(len, rows)), cut), 0
        waiting = deque(sorted(range(len(rows)), key=lambda index: len(rows[index])))
        while waiting:
            batch = [waiting.popleft()]
            while waiting:
                longest = len(rows[waiting[0]])
                if (len(batch) + 1) * longest > encoder.size or (longest > len(rows[batch[0]]) and not encoder.pads):
                    break
                batch.append(waiting.popleft())
            chosen = [rows[index] for index in batch]
            vectors = self._thread.chore(_step(encoder, chosen))
            if dimensions != encoder.dimensions:
                vectors = vectors[:, :dimensions]
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            found.vectors[batch] = vectors
            done += sum(map(len, chosen))
            yield Progress(done, found.tokens)
        return found

    def cards(self) -> tuple[ModelCard, ...]:
        files = self._files
        if files is None:
            return ()
        known = {} if self._dimensions is None else {"dimensions": self._dimensions}
        card = ModelCard(
            files.name,
            self._created,
            files.most_tokens,
            tools=False,
            reasoning=False,
            images="reject",
            state="stored" if self._dimensions is None else "ready",
            pinned=True,
            weight_bytes=files.weight_bytes,
            details={"source": self._source, "kind": "embedding", **known},
        )
        return (card,)

    def figures(self) -> dict[str, float]:
        """Totals, by the names that `/metrics` shows."""
        return {"embedded_texts": self._texts, "embedded_tokens": self._tokens}

    def _known(self) -> EncoderFiles:
        if self._files is not None:
            return self._files
        if self._problem is not None:
            raise self._problem.again()
        check_installed(LIBRARY)
        if self._source is not None:
            raise Unavailable("The server is still starting.")
        raise NotSupported("This server has no embedding model: set EMBEDDING_MODEL to a repository or folder.")


def _row(files: EncoderFiles, text: Text, param: str, *, truncate: bool) -> tuple[tuple[int, ...], bool]:
    """A text's tokens, special ones included, and whether it is all of it. Raises BadRequest, which names the text."""
    most = files.most_tokens - len(files.before) - len(files.after)
    if isinstance(text, str):
        most_characters = CHARACTERS * files.most_tokens
        if len(text) > most_characters and not truncate:
            raise _too_long(param, len(text) // CHARACTERS, files, at_least=True)
        ids = files.tokenizer.encode(text[:most_characters], add_special_tokens=False).ids
    else:
        ids = list(text)
        odd = next((token for token in ids if token >= files.vocabulary), None)
        if odd is not None:
            known = f"the vocabulary of {files.name} ({files.vocabulary} tokens)"
            remedy = "send the text if the ids are another tokenizer's."
            raise BadRequest(f"{param}: the token {odd} is not in {known}; {remedy}", param=param)
    if len(ids) > most and not truncate:
        raise _too_long(param, len(ids) + len(files.before) + len(files.after), files)
    return files.tokens_of(ids[:most]), len(ids) <= most


def _too_long(param: str, tokens: int, files: EncoderFiles, *, at_least: bool = False) -> BadRequest:
    count = f"at least {tokens}" if at_least else str(tokens)
    why = f"{count} tokens, but {files.name} reads at most {files.most_tokens}"
    remedy = 'send shorter texts, or "truncate": true to have the rest left out.'
    return BadRequest(f"{param}: {why}; {remedy}", param=param, code=ContextLengthExceeded.code)


def _step(encoder: Encoder, rows: Sequence[tuple[int, ...]]) -> Generator[float, None, Any]:
    """One step of the model thread."""
    yield 0.0
    return encoder.encode(rows)
