"""A Whisper checkpoint of two megabytes with random weights, and sounds to try it on.

Its layers are small beside its positions, and its last norm is large: so its tokens are sure, they change from place to
place, and what it hears still changes some of them.
"""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

RATE = 16000
WORDS = 50257
WIDTH, HEADS, LAYERS, TEXT, HEARD = 16, 2, 1, 32, 1500
CONFIG: dict[str, Any] = {"model_type": "whisper", "n_mels": 80, "n_vocab": 51865}
CONFIG |= {"n_audio_ctx": HEARD, "n_text_ctx": TEXT}
for part in ("audio", "text"):
    CONFIG |= {f"n_{part}_state": WIDTH, f"n_{part}_head": HEADS, f"n_{part}_layer": LAYERS}


def build_whisper(folder: Path, *, tokenizer: bool = True) -> Path:
    """`tokenizer`: without one the checkpoint cannot be used."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        _write_tokenizer(folder)
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def tone(seconds: float, hertz: float = 300.0, rate: int = RATE) -> np.ndarray:
    """float32 in -1 to 1; it grows louder and falls silent by turns."""
    at = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * hertz * at) * np.sin(2 * np.pi * 0.4 * at)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """16 bits."""
    data = np.repeat((samples * 32767).astype("<i2"), channels)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(data.tobytes())
    return file.getvalue()


def encoded(kind: str, rate: int, subtype: str | None = None, seconds: float = 1.5) -> bytes:
    """A file of another format."""
    soundfile: Any = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate=rate), rate, format=kind, subtype=subtype)
    return file.getvalue()


def _write_tokenizer(folder: Path) -> None:
    from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{number}" for number in range(WORDS - len(letters)))]
    marks = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in list(LANGUAGES)[:99])]
    marks += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    marks += [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    assert tokenizer.get_vocab_size() == CONFIG["n_vocab"]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write_settings(folder, 80)


def write_settings(folder: Path, mels: int) -> None:
    """Of the tokenizer and of what hears."""
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer", **names}))
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**extractor, "feature_size": mels}))


def _weights() -> dict[str, Any]:
    random = np.random.default_rng(11)
    weights: dict[str, Any] = {}

    def put(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        weights[name] = random.normal(mean, scale, shape).astype(np.float16)

    def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> None:
        put(f"{name}.weight", outputs, inputs, scale=0.25)
        if bias:
            put(f"{name}.bias", outputs, scale=0.05)

    def norm(name: str, mean: float = 1.0) -> None:
        put(f"{name}.weight", WIDTH, scale=0.05, mean=mean)
        put(f"{name}.bias", WIDTH, scale=0.05)

    def block(name: str, *, crossed: bool) -> None:
        for attention in ("attn", "cross_attn") if crossed else ("attn",):
            for part in ("query", "key", "value", "out"):
                linear(f"{name}.{attention}.{part}", WIDTH, WIDTH, bias=part != "key")
            norm(f"{name}.{attention}_ln")
        linear(f"{name}.mlp1", WIDTH, 4 * WIDTH)
        linear(f"{name}.mlp2", 4 * WIDTH, WIDTH)
        norm(f"{name}.mlp_ln")

    put("encoder.conv1.weight", WIDTH, 3, 80, scale=0.3)
    put("encoder.conv1.bias", WIDTH, scale=0.1)
    put("encoder.conv2.weight", WIDTH, 3, WIDTH, scale=0.3)
    put("encoder.conv2.bias", WIDTH, scale=0.1)
    put("decoder.token_embedding.weight", CONFIG["n_vocab"], WIDTH, scale=1.0)
    put("decoder.positional_embedding", TEXT, WIDTH, scale=3.0)
    for layer in range(LAYERS):
        block(f"encoder.blocks.{layer}", crossed=False)
        block(f"decoder.blocks.{layer}", crossed=True)
    norm("encoder.ln_post")
    norm("decoder.ln", mean=12.0)
    return weights
