"""A BERT checkpoint of a few kilobytes with random weights, in the shape of sentence-transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", ",", "the", "and"]
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "vocab_size": len(WORDS),
}


def build_encoder(folder: Path, *, pooling: str = "pooling_mode_mean_tokens", most: int = 48) -> Path:
    name, _, mode = pooling.partition("=")
    pooling_settings = {name: mode} if mode else {"pooling_mode_max_tokens": False, pooling: True}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_settings))
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    special = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


TEXT = (
    "the server keeps what it has read and computes only what is new def return self import class for in while "
    "cache token prompt agent model memory thread queue batch row step error file folder path name value key "
    "Straße naïve façade über Москва 東京 データ 你好 مرحبا 🙂 x=1; y[0] -> {} </tag> 3.14 2026-11-22 https://example.org/a?b=c"
)


def texts(count: int = 200, longest: int = 60) -> list[str]:
    words, draw = TEXT.split(), random.Random(13)
    return [" ".join(draw.choices(words, k=1 + index * longest // count)) for index in range(count)]


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    width, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    for name, count in (
        ("word", "vocab_size"),
        ("position", "max_position_embeddings"),
        ("token_type", "type_vocab_size"),
    ):
        yield f"embeddings.{name}_embeddings", (CONFIG[count], width)
    yield "embeddings.LayerNorm", (width,)
    for layer in range(CONFIG["num_hidden_layers"]):
        begin = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield f"{begin}.attention.{part}", (width, width)
        yield f"{begin}.intermediate.dense", (wide, width)
        yield f"{begin}.output.dense", (width, wide)
        for part in ("attention.output", "output"):
            yield f"{begin}.{part}.LayerNorm", (width,)
    yield "pooler.dense", (width, width)


def _weights() -> dict[str, Any]:
    random, weights = np.random.default_rng(7), dict[str, Any]()
    for name, shape in _shapes():
        mean, spread = (1, 0.1) if "LayerNorm" in name else (0, 1) if "_embeddings" in name else (0, 0.2)
        weights[f"{name}.weight"] = random.normal(mean, spread, shape).astype(np.float32)
        if "_embeddings" not in name:
            weights[f"{name}.bias"] = random.normal(0, 0.1, shape[0]).astype(np.float32)
    return weights
