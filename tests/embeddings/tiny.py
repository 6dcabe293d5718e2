"""A BERT checkpoint of a few kilobytes with random weights, in the shape of sentence-transformers."""

from __future__ import annotations

import json
import random
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


def _weights() -> dict[str, Any]:
    random = np.random.default_rng(7)
    width, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    weights: dict[str, Any] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        weights[f"{name}.weight"] = random.normal(0, 0.2, (outputs, inputs)).astype(np.float32)
        weights[f"{name}.bias"] = random.normal(0, 0.1, outputs).astype(np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = random.normal(1, 0.1, width).astype(np.float32)
        weights[f"{name}.bias"] = random.normal(0, 0.1, width).astype(np.float32)

    for name, count in (
        ("word", CONFIG["vocab_size"]),
        ("position", CONFIG["max_position_embeddings"]),
        ("token_type", CONFIG["type_vocab_size"]),
    ):
        weights[f"embeddings.{name}_embeddings.weight"] = random.normal(0, 1, (count, width)).astype(np.float32)
    norm("embeddings.LayerNorm")
    for layer in range(CONFIG["num_hidden_layers"]):
        begin = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{begin}.attention.self.{part}", width, width)
        linear(f"{begin}.attention.output.dense", width, width)
        norm(f"{begin}.attention.output.LayerNorm")
        linear(f"{begin}.intermediate.dense", width, wide)
        linear(f"{begin}.output.dense", wide, width)
        norm(f"{begin}.output.LayerNorm")
    linear("pooler.dense", width, width)
    return weights


TEXT = (
    "the server keeps what it has read and computes only what is new def return self import class for in while "
    "cache token prompt agent model memory thread queue batch row step error file folder path name value key "
    "Straße naïve façade über Москва 東京 データ 你好 مرحبا 🙂 x=1; y[0] -> {} </tag> 3.14 2026-11-22 https://example.org/a?b=c"
)


def texts(count: int = 200, longest: int = 60) -> list[str]:
    words, draw = TEXT.split(), random.Random(13)
    return [" ".join(draw.choices(words, k=1 + index * longest // count)) for index in range(count)]
