"""The small files of a checkpoint with as many tokens as one likes: byte-level BPE, in Qwen's form."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import pre_tokenizers

MERGES = (Path(__file__).parents[1] / "oracle" / "merges.txt").read_text("utf-8").splitlines()
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
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [line.split(" ") for line in MERGES[: tokens - len(ADDED) - len(vocab)]]
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(merges)}
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
    config = {"model_type": "llama", "eos_token_id": len(vocab) + ADDED.index("<|im_end|>")}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
