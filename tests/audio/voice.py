"""A Soprano checkpoint with random weights: a tiny language model, and a decoder of the only size that there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tests.audio.tiny import random_weights

WIDTH, HEADS = 16, 2
LETTERS = "aeot ."
MARKS = ["[STOP]", "[TEXT]", "[START]", "[UNK]"]
CONFIG: dict[str, Any] = {
    "model_type": "soprano",
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "vocab_size": len(MARKS) + len(LETTERS),
    "sample_rate": 32000,
}


def build_voice(folder: Path) -> Path:
    """Each of its ten tokens is about as likely as the others, and one of them is the end: what it speaks is short.

    The end never comes first, so it is never silent.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocab = {word: index for index, word in enumerate([*MARKS, *LETTERS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[STOP]", "eos_token": "[STOP]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    weights = random_weights(_model, 5, _drawn)
    weights["language_model.embed_tokens.weight"][:, 0] = np.eye(CONFIG["vocab_size"])[MARKS.index("[START]")] * 8
    weights["language_model.lm_head.weight"][:, 0] = np.eye(CONFIG["vocab_size"])[MARKS.index("[STOP]")] * -4
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def _model() -> Any:
    from mlx_audio.tts.models.soprano.soprano import Model, ModelConfig

    return Model(ModelConfig.from_dict({**CONFIG, "model_path": "tiny-voice"}))


def _drawn(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    *_, owner, kind = name.split(".")
    if kind in {"bias", "gamma"} or "norm" in owner:
        return {"bias": 0.0, "gamma": 0.2}.get(kind, 1.0), 0.05
    return 0.0, {"embed_tokens": 1.0, "lm_head": 0.05, "embed": 0.2, "dwconv": 0.3}.get(owner, shape[-1] ** -0.5)
