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

WIDTH, WIDE, LAYERS, HEADS, DECODER, FFT = 16, 32, 1, 2, 512, 2048
LETTERS = "aeot ."
MARKS = ["[STOP]", "[TEXT]", "[START]", "[UNK]"]
CONFIG: dict[str, Any] = {
    "model_type": "soprano",
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
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
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def _weights() -> dict[str, Any]:
    random = np.random.default_rng(5)
    weights: dict[str, Any] = {}

    def put(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        weights[name] = random.normal(mean, scale, shape).astype(np.float16)

    def linear(name: str, inputs: int, outputs: int) -> None:
        put(f"{name}.weight", outputs, inputs, scale=inputs**-0.5)
        put(f"{name}.bias", outputs, scale=0.05)

    def norm(name: str, width: int) -> None:
        put(f"{name}.weight", width, scale=0.05, mean=1.0)
        put(f"{name}.bias", width, scale=0.05)

    top, each = "language_model", WIDTH // HEADS
    put(f"{top}.embed_tokens.weight", CONFIG["vocab_size"], WIDTH, scale=1.0)
    put(f"{top}.lm_head.weight", CONFIG["vocab_size"], WIDTH, scale=0.05)
    weights[f"{top}.embed_tokens.weight"][:, 0] = np.eye(CONFIG["vocab_size"])[MARKS.index("[START]")] * 8
    weights[f"{top}.lm_head.weight"][:, 0] = np.eye(CONFIG["vocab_size"])[MARKS.index("[STOP]")] * -4
    put(f"{top}.norm.weight", WIDTH, scale=0.05, mean=1.0)
    for layer in range(LAYERS):
        begin = f"{top}.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            put(f"{begin}.self_attn.{part}.weight", WIDTH, WIDTH, scale=0.3)
        for part in ("q_norm", "k_norm"):
            put(f"{begin}.self_attn.{part}.weight", each, scale=0.05, mean=1.0)
        for part in ("input_layernorm", "post_attention_layernorm"):
            put(f"{begin}.{part}.weight", WIDTH, scale=0.05, mean=1.0)
        put(f"{begin}.mlp.gate_proj.weight", WIDE, WIDTH, scale=0.3)
        put(f"{begin}.mlp.up_proj.weight", WIDE, WIDTH, scale=0.3)
        put(f"{begin}.mlp.down_proj.weight", WIDTH, WIDE, scale=0.3)
    decoder = "decoder.decoder"
    put(f"{decoder}.embed.weight", DECODER, 3, WIDTH, scale=0.2)
    put(f"{decoder}.embed.bias", DECODER, scale=0.05)
    norm(f"{decoder}.norm", DECODER)
    norm(f"{decoder}.final_layer_norm", DECODER)
    for layer in range(8):
        begin = f"{decoder}.convnext.{layer}"
        put(f"{begin}.dwconv.weight", DECODER, 3, 1, scale=0.3)
        put(f"{begin}.dwconv.bias", DECODER, scale=0.05)
        norm(f"{begin}.norm", DECODER)
        linear(f"{begin}.pwconv1", DECODER, 3 * DECODER)
        linear(f"{begin}.pwconv2", 3 * DECODER, DECODER)
        put(f"{begin}.gamma", DECODER, scale=0.05, mean=0.2)
    linear("decoder.head.out", DECODER, FFT + 2)
    return weights
