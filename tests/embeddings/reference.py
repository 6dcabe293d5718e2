"""A BERT encoder with mean pooling, in numpy: the algorithm that its authors published, one text at a time.

It shares no code with the server: own tokenisation (WordPiece by the `tokenizers` library), own arithmetic in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

erf = np.vectorize(math.erf)


class Reference:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def text(self, text: str, most: int) -> Any:
        ids = self.tokenizer.encode(text).ids
        return self.tokens(ids if len(ids) <= most else [*ids[: most - 1], ids[-1]])

    def tokens(self, ids: Sequence[int]) -> Any:
        """The mean of the last layer's vectors, of length 1."""
        weights, count = self.weights, len(ids)
        hidden = weights["embeddings.word_embeddings.weight"][list(ids)]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][:count]
        hidden = self._norm(hidden + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            hidden = self._layer(hidden, f"encoder.layer.{layer}")
        mean = hidden.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def _layer(self, hidden: Any, name: str) -> Any:
        heads = self.config["num_attention_heads"]
        query, key, value = (
            self._linear(hidden, f"{name}.attention.self.{part}").reshape(len(hidden), heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        seen = (shares @ value).swapaxes(0, 1).reshape(len(hidden), -1)
        seen = self._linear(seen, f"{name}.attention.output.dense")
        hidden = self._norm(hidden + seen, f"{name}.attention.output.LayerNorm")
        wide = self._linear(hidden, f"{name}.intermediate.dense")
        wide = wide * 0.5 * (1 + erf(wide / math.sqrt(2)))
        return self._norm(hidden + self._linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _linear(self, values: Any, name: str) -> Any:
        return values @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, values: Any, name: str) -> Any:
        centred = values - values.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.config["layer_norm_eps"])
        return centred / spread * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
