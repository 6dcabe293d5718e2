"""Writes the oracle's checkpoint: configuration, code, tokenizer, a token of a weight."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.oracle.templates import TEMPLATES

Kind = Literal["plain", "hybrid", "windowed"]

SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LAYERS: dict[str, list[str]] = {"plain": ["K", "K"], "hybrid": ["A", "K", "A", "K"], "windowed": ["R", "K", "R", "K"]}
CONTEXT = 262_144
_HERE = Path(__file__).parent


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of 6,144 tokens, about three characters a token; the same on every machine.

    `merges.txt` was trained once with `tokenizers` on the documentation and sources in Python's standard library.
    """
    vocabulary = {token: i for i, token in enumerate(SPECIAL + MARKS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    merges = [(a, b) for a, b in (line.split(" ") for line in (_HERE / "merges.txt").read_text("utf-8").splitlines())]
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


@cache
def _own_tokenizer() -> tuple[str, int]:
    """`make_tokenizer` as its file, and how many tokens it has: made once, since many tests write a checkpoint."""
    tokenizer = make_tokenizer()
    return tokenizer.to_str(), tokenizer.get_vocab_size()


def _config(layers: Sequence[str], vocabulary: int, window: int) -> dict[str, Any]:
    return {
        "model_type": "oracle",
        "model_file": "oracle_model.py",
        "architectures": ["Oracle"],
        "layer_kinds": list(layers),
        "num_hidden_layers": len(layers),
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 1,
        "vocab_size": vocabulary,
        "window": window,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 3,
        "torch_dtype": "float32",
    }


def build_oracle(
    folder: Path,
    kind: Kind = "plain",
    *,
    template: str = "plain",
    window: int = 128,
    tokenizer: Tokenizer | None = None,
    layers: Sequence[str] | None = None,
) -> Path:
    """Writes a checkpoint into `folder` (made if needed) and returns it.

    It loads with ``mlx_lm.load(folder, trust_remote_code=True)`` and serves with
    ``mlx_lm.server --trust-remote-code``.

    Args:
        kind: ``plain`` (K K), ``hybrid`` (A K A K: half of the layers keep a state that cannot be cut) or ``windowed``
            (R K R K: half of the layers are rotating, of `window` tokens).
        template: a name of `tests.oracle.templates`.
        tokenizer: another one than `make_tokenizer` makes; `SPECIAL` must be its first tokens, in this order.
        layers: instead of those of `kind`, for an oracle that is quicker; one of them at least is a ``K``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, size = (tokenizer.to_str(), tokenizer.get_vocab_size()) if tokenizer else _own_tokenizer()
    (folder / "tokenizer.json").write_text(text, "utf-8")
    shutil.copy(_HERE / "model_file.py", folder / "oracle_model.py")
    shutil.copy(_HERE / "answers.py", folder / "oracle_answers.py")
    (folder / "config.json").write_text(json.dumps(_config(layers or LAYERS[kind], size, window), indent=1))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "unk_token": None,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[template],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    save_file({"weight": np.zeros(8, np.float32)}, str(folder / "model.safetensors"), metadata={"format": "mlx"})
    return folder
