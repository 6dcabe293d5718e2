"""Encoder models by mlx-embeddings, an extra of the package. Arrays belong to the model thread.

Weights are read in pieces, texts go through the model in small batches. Between two of them others have their turn.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from start_llm.embeddings.checkpoint import EncoderFiles, Pooling, read_encoder
from start_llm.models.stepwise import loading

LIBRARY = "mlx_embeddings"
STEP_SECONDS = 0.1  # what a batch should take, so that a row that decodes hardly waits
FIRST, MOST = 512, 16384
"""Tokens of the first batch, and of any batch; padding included. A text that is longer is a batch by itself."""
_SAME = 0.999
_NEWEST = 0.5  # weight of the last batch in the average


class Encoder:
    """A loaded encoder. Model thread only, but for the attributes."""

    nbytes = 0  # its weights take none of the memory that models share: they were set aside at the start

    def __init__(self, model: Any, files: EncoderFiles) -> None:
        self._model, self._pooling = model, files.pooling
        self.size, self._seconds = FIRST, 0.0  # tokens that the next batch may have, padding included; cost of one
        self.dimensions = 0  # of its vectors
        self.pads = True  # texts of different lengths may share a batch
        self._look(files)

    def _look(self, files: EncoderFiles) -> None:
        """Whether padding changes a text's vector, which some architectures do not keep apart."""
        short, long = (files.tokens_of([files.vocabulary // 2] * count) for count in (2, 7))
        alone = self._forward([short])[0]
        self.dimensions = len(alone)
        self.pads = float(self._forward([short, long])[0] @ alone) > _SAME

    def encode(self, rows: Sequence[tuple[int, ...]]) -> Any:
        """(rows, dimensions) float32, each row of length 1."""
        began = time.monotonic()
        vectors = self._forward(rows)
        tokens = len(rows) * max(map(len, rows))
        cost = (time.monotonic() - began) / tokens
        self._seconds = cost if not self._seconds else (1 - _NEWEST) * self._seconds + _NEWEST * cost
        self.size = max(1, min(int(STEP_SECONDS / self._seconds), MOST, max(FIRST, 2 * tokens)))
        return vectors

    def _forward(self, rows: Sequence[tuple[int, ...]]) -> Any:
        longest = max(map(len, rows))
        ids, mask = np.zeros((len(rows), longest), np.int32), np.zeros((len(rows), longest), np.int32)
        for index, row in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)] = row, 1
        kept = mx.array(mask)
        output = self._model(mx.array(ids), attention_mask=kept)
        pooled = output.text_embeds if self._pooling is None else pool(output.last_hidden_state, kept, self._pooling)
        pooled = pooled.astype(mx.float32)
        return np.array(pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12))


def pool(hidden: mx.array, mask: mx.array, how: Pooling) -> mx.array:
    """(texts, tokens, width) and (texts, tokens), 1 for a token and 0 for padding behind it, to (texts, width)."""
    if how == "cls":
        return hidden[:, 0]
    if how == "last":
        return hidden[mx.arange(hidden.shape[0]), mask.sum(axis=1) - 1]
    kept = mask[..., None].astype(hidden.dtype)
    if how == "max":
        return mx.where(kept > 0, hidden, -mx.inf).max(axis=1)
    return (hidden.astype(mx.float32) * kept).sum(axis=1) / kept.astype(mx.float32).sum(axis=1)


def load_steps(folder: Path, name: str) -> Generator[float, None, Encoder]:
    """Imports the library, which takes seconds; the steps, on the model thread, read weights. Raises NotSupported."""
    library, files = importlib.import_module(f"{LIBRARY}.utils"), read_encoder(name, folder)
    load = partial(library.load_model, files.folder, lazy=True, path_to_repo=files.name)
    title = f"{files.name} ({files.config.get('model_type')})"
    return loading("mlx-embeddings", title, load, lambda model: Encoder(model, files))
