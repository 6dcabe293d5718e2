"""A checkpoint of a small llama with as many tokens as one likes: byte-level BPE, words at random.

What reading a tokenizer costs depends on how many tokens it has, and hardly on what they say.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

WIDTH, HEADS, LAYERS = 64, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (*SPECIAL, "<tool_call>", "</tool_call>", "<think>", "</think>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_large(folder: Path, tokens: int) -> Path:
    """Writes it. `tokens`: of the vocabulary, those that are added included."""
    folder.mkdir(parents=True)
    vocab, merges = _words(tokens - len(ADDED))
    added = [
        {"id": len(vocab) + index, "content": text, "special": text in SPECIAL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, text in enumerate(ADDED)
    ]
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "vocab_size": tokens,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": len(vocab) + ADDED.index("<|im_end|>"),
    }
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(tokens), folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def _words(count: int) -> tuple[dict[str, int], list[list[str]]]:
    """The bytes, and words that are each made of two shorter ones."""
    rng = random.Random(count)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    words, merges = list(alphabet), []
    letters = [each for each in alphabet if each.isascii() and each.isalpha()] + ["Ġ"]
    while len(vocab) < count:
        rare = rng.random() < 0.2
        first, second = rng.choice(words if rare else letters), rng.choice(alphabet if rare else letters)
        word = first + second
        if len(word) > 14 or word in vocab or "Ġ" in word[1:]:
            continue
        vocab[word] = len(vocab)
        merges.append([first, second])
        words.append(word)
        if word.isascii() or word.startswith("Ġ"):
            letters.append(word)
    return vocab, merges


def _weights(tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)

    def some(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float16)

    found = {"model.embed_tokens.weight": some(tokens, WIDTH), "model.norm.weight": np.ones(WIDTH, np.float16)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part in ("q", "k", "v", "o"):
            found[f"{name}.self_attn.{part}_proj.weight"] = some(WIDTH, WIDTH)
        for part, shape in (("gate", (2 * WIDTH, WIDTH)), ("up", (2 * WIDTH, WIDTH)), ("down", (WIDTH, 2 * WIDTH))):
            found[f"{name}.mlp.{part}_proj.weight"] = some(*shape)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{part}.weight"] = np.ones(WIDTH, np.float16)
    return found
