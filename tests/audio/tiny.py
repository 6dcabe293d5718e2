"""A Whisper checkpoint of two megabytes with random weights, and sounds. Layers are small beside positions,
and the last norm is large: tokens are sure, change from place to place, and what it hears changes some of them."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.together import together

RATE = 16000
WORDS = 50257
CONFIG: dict[str, Any] = {"model_type": "whisper", "n_mels": 80, "n_vocab": 51865}
CONFIG |= {"n_audio_ctx": 1500, "n_text_ctx": 32}
for part in ("audio", "text"):
    CONFIG |= {f"n_{part}_state": 16, f"n_{part}_head": 2, f"n_{part}_layer": 1}


def build_whisper(folder: Path, *, tokenizer: bool = True) -> Path:
    """`tokenizer`: without one the checkpoint cannot be used."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        _write_tokenizer(folder)
    save_file(random_weights(_model, 11, _drawn), folder / "model.safetensors", metadata={"format": "mlx"})
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
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer", **names}))
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**extractor, "feature_size": CONFIG["n_mels"]}))


def random_weights(
    make: Callable[[], Any], seed: int, drawn: Callable[[str, tuple[int, ...]], tuple[float, float]]
) -> dict[str, Any]:
    """Of the names and shapes of a model that `make` makes. `drawn`: the mean and the spread of one of them."""
    shapes = together([lambda: [(name, value.shape) for name, value in tree_flatten(make().parameters())]])[0]
    random = np.random.default_rng(seed)
    return {name: random.normal(*drawn(name, shape), shape).astype(np.float16) for name, shape in shapes}


def _model() -> Any:
    from mlx_audio.stt.models.whisper.whisper import Model, ModelDimensions

    return Model(ModelDimensions.from_dict(CONFIG))


def _drawn(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    *_, owner, kind = name.split(".")
    if "embedding" in name:
        return 0.0, 3.0 if "positional" in name else 1.0
    if "ln" in owner:
        return 0.0 if kind == "bias" else 12.0 if name.startswith("decoder.ln.") else 1.0, 0.05
    return 0.0, (0.3, 0.1)[kind == "bias"] if "conv" in owner else (0.25, 0.05)[kind == "bias"]
