"""Speech to text by Whisper models of mlx-audio, an extra of the package. Arrays belong to the model thread.

`Model.generate` of mlx-audio hears a whole recording in one call. Here the same is done in steps that other models can
work between: a spectrogram of half a minute, a window's encoding, a token. What is decided in a window (when it is
tried again, where its segments end, where the next one begins) is Whisper's own, and tests compare the two.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from start_llm.audio.samples import LIBRARY, RATE
from start_llm.core.errors import BadRequest
from start_llm.core.media import Hints, Transcript, TranscriptSegment
from start_llm.models.stepwise import bytes_of, loading

HOP, FFT = 160, 400
WINDOW = 3000  # frames of a window: half a minute
LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that a window is tried with, one after the other, until its text is good."""
MOST_COMPRESSION, LEAST_LOGPROB, SILENT, HOT = 2.4, -1.0, 0.6, 0.5

Steps = Generator[float, None, Any]
"""Each yield: the seconds of the recording that are done."""


def load_steps(folder: Path, name: str) -> Generator[float, None, Transcriber]:
    """Imports the library, which takes seconds; the steps, on the model thread, read weights. Raises NotSupported."""
    importlib.import_module(f"{LIBRARY}.stt.models.whisper.whisper")
    importlib.import_module("transformers.models.whisper")
    library = importlib.import_module(f"{LIBRARY}.stt.utils")

    def load() -> Any:
        model = library.load_model(folder, lazy=True)
        model.get_tokenizer()
        return model

    return loading("mlx-audio", name, load, lambda model: Transcriber(model, name))


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A window's tokens at one temperature."""

    tokens: list[int]
    temperature: float
    logprob: float
    silence: float
    compression: float

    @property
    def is_good(self) -> bool:
        if self.logprob < LEAST_LOGPROB:
            return self.silence > SILENT  # there is nothing to be heard, so nothing gets better
        return not self.compression > MOST_COMPRESSION


@dataclass(slots=True)
class _Story:
    """What was heard so far."""

    tokens: list[int]  # the client's prompt, then all segments'
    since: int = 0  # from which of them on the next window is told
    segments: list[TranscriptSegment] = field(default_factory=list)


class Transcriber:
    """A loaded Whisper model. Model thread only, but for `check` and `nbytes` (what its weights take)."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self.nbytes = bytes_of(model)
        self._tools: Any = importlib.import_module(f"{LIBRARY}.stt.models.whisper.decoding")
        self._signal: Any = importlib.import_module(f"{LIBRARY}.utils")
        languages = importlib.import_module(f"{LIBRARY}.stt.models.whisper.tokenizer")
        self._names: dict[str, str] = languages.TO_LANGUAGE_CODE
        self._codes = tuple(model.get_tokenizer().all_language_codes) if model.is_multilingual else ("en",)

    def check(self, language: str | None) -> str | None:
        """Its code. Raises BadRequest: the model does not know it. Any thread."""
        if language is None:
            return None
        code = self._names.get(language.lower(), language.lower())
        if code not in self._codes:
            message = f"language={language[:40]!r}: {self._name} knows {', '.join(self._codes)}."
            raise BadRequest(message, param="language", code="invalid_value")
        return code

    def transcribe(self, samples: np.ndarray, hints: Hints) -> Steps:
        """`samples`: float32, `RATE` a second, at least one. Returns a Transcript."""
        seconds = len(samples) / RATE
        spectrum = yield from self._spectrum(samples)
        frames, seek = len(spectrum) - WINDOW, 0
        language, heard = hints.language, None
        if language is None and self._model.is_multilingual:
            heard = self._encoded(spectrum, 0, WINDOW)
            yield 0.0
            _, likely = self._model.detect_language(heard)
            language = str(max(likely[0], key=likely[0].get))
        tokenizer = self._model.get_tokenizer(language=language or "en", task="transcribe")
        begin = tokenizer.encode(" " + hints.prompt.strip()) if hints.prompt.strip() else []
        story = _Story(list(begin))
        while seek < frames:
            size = min(WINDOW, frames - seek)
            if heard is None or size < WINDOW or seek:
                heard = self._encoded(spectrum, seek, size)
                yield seek * HOP / RATE
            decoded = yield from self._decoded(heard, tokenizer, story, hints, seek)
            seek += self._added(decoded, tokenizer, story, seek, size)
            heard = None
            mx.clear_cache()
        text = tokenizer.decode(story.tokens[len(begin) :])
        return Transcript(text, tokenizer.language, seconds, tuple(story.segments))

    def _spectrum(self, samples: np.ndarray) -> Steps:
        """Log mel powers, (frames, mels), with a window of silence behind; a window a step."""
        frames, mels = len(samples) // HOP + WINDOW, self._model.dims.n_mels
        shape = self._signal.hanning(FFT, periodic=True)
        filters = self._signal.mel_filters(RATE, FFT, mels, norm="slaney", mel_scale=None).T
        found, most = np.empty((frames, mels), np.float32), -math.inf
        for begin in range(0, frames, WINDOW):
            end = min(begin + WINDOW, frames)
            piece = mx.array(_around(samples, begin * HOP, (end - 1) * HOP + FFT))
            waves = self._signal.stft(piece, window=shape, n_fft=FFT, hop_length=HOP, center=False)
            powers = np.array(mx.maximum(waves.abs().square() @ filters, 1e-10).log10())
            found[begin:end], most = powers, max(most, powers.max())
            yield 0.0
        for begin in range(0, frames, WINDOW):
            part = found[begin : begin + WINDOW]
            part[:] = (np.maximum(part, np.float32(most) - np.float32(8.0)) + 4.0) / 4.0
            yield 0.0
        return found

    def _encoded(self, spectrum: np.ndarray, seek: int, size: int) -> mx.array:
        """What the encoder makes of a window, (1, positions, width). It is one step."""
        window = np.zeros((1, WINDOW, spectrum.shape[1]), np.float32)
        window[0, :size] = spectrum[seek : seek + size]
        features: mx.array = self._model.embed_audio(mx.array(window).astype(self._model.dtype))
        mx.eval(features)
        return features

    def _decoded(self, features: mx.array, tokenizer: Any, story: _Story, hints: Hints, seek: int) -> Steps:
        """A window's tokens, at the first temperature that makes good ones; else those of the last."""
        decoded = None
        for temperature in [hints.temperature] if hints.temperature else LADDER:
            options = self._tools.DecodingOptions(
                language=tokenizer.language, temperature=temperature, prompt=story.tokens[story.since :]
            )
            decoded = yield from self._attempt(features, self._tools.DecodingTask(self._model, options), seek)
            if decoded.is_good:
                break
        return decoded

    def _attempt(self, features: mx.array, task: Any, seek: int) -> Steps:
        """One temperature; a token a step."""
        tokens, total, silence = mx.array([task.initial_tokens]), mx.zeros(1), math.nan
        inputs = tokens
        for place in range(task.sample_len):
            if place and tokens.shape[-1] > task.n_ctx:
                break
            logits = task.inference.logits(inputs, features)
            if not place and task.tokenizer.no_speech is not None:
                silence = float(mx.softmax(logits[0, task.sot_index], axis=-1)[task.tokenizer.no_speech])
            last = logits[:, -1]
            for rule in task.logit_filters:
                last = rule.apply(last, tokens)
            tokens, ended, total = task.decoder.update(tokens, last, total)
            mx.eval(tokens, ended, total)
            if ended.item():
                break
            inputs = tokens[:, -1:]
            yield seek * HOP / RATE
        found: list[int] = np.array(tokens[0, task.sample_begin :]).tolist()
        if task.tokenizer.eot in found:
            found = found[: found.index(task.tokenizer.eot)]
        text = task.tokenizer.decode(found).strip()
        ratio = self._tools.compression_ratio(text)
        return _Decoded(found, task.options.temperature, float(total[0]) / (len(found) + 1), silence, ratio)

    def _added(self, decoded: _Decoded, tokenizer: Any, story: _Story, seek: int, size: int) -> int:
        """Adds a window's segments. Returns how many frames it covers; the next one begins there."""
        if decoded.silence > SILENT and not decoded.logprob > LEAST_LOGPROB:
            return size
        step = WINDOW // self._model.dims.n_audio_ctx  # frames of a timestamp's step
        pieces, covered = _cut(decoded.tokens, tokenizer.timestamp_begin, step, size)
        for start, end, tokens in pieces:
            text = tokenizer.decode([token for token in tokens if token < tokenizer.eot])
            if start == end or not text.strip():
                text, tokens = "", []
            first, last = (seek + start) * HOP / RATE, (seek + end) * HOP / RATE
            said = (decoded.temperature, decoded.logprob, decoded.compression, decoded.silence)
            story.segments.append(TranscriptSegment(seek, first, last, text, tuple(tokens), *said))
            story.tokens += tokens
        if decoded.temperature > HOT:
            story.since = len(story.tokens)  # what was guessed is not told to the next window
        return covered or size


def _around(samples: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Places `begin` to `end` of a recording that half an `FFT` was set before, its mirror image; silence follows.

    Only what lies there is copied: a recording may be large. From 0 on, more than an `FFT` is wanted.
    """
    found = np.zeros(end - begin, np.float32)
    before = max(0, FFT // 2 - begin)
    heard = samples[max(0, begin - FFT // 2) : max(0, end - FFT // 2)]
    found[before : before + len(heard)] = heard
    if before:
        found[:before] = found[before + 1 : 2 * before + 1][::-1]
    return found


def _cut(tokens: Sequence[int], first: int, step: int, size: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Segments of a window, as (first frame, last frame, tokens), and the frames that they cover.

    A segment stands between two timestamps; one ends and the next begins where two follow each other. What is behind
    the last pair is heard again in the next window, unless a single timestamp ends the window: then nobody speaks
    behind it. `first`: the token of the timestamp 0; `step`: frames between two; `size`: frames of the window.
    """
    is_stamp = [token >= first for token in tokens]
    ends_alone = is_stamp[-2:] == [False, True]
    bounds = [index for index in range(1, len(tokens)) if is_stamp[index] and is_stamp[index - 1]]
    if not bounds:
        stamps = [token for token, stamp in zip(tokens, is_stamp, strict=True) if stamp]
        last = (stamps[-1] - first) * step if stamps and stamps[-1] != first else size
        return [(0, last, list(tokens))], size
    pieces = []
    for begin, end in zip([0, *bounds], [*bounds, *([len(tokens)] if ends_alone else [])], strict=False):
        part = list(tokens[begin:end])
        pieces.append(((part[0] - first) * step, (part[-1] - first) * step, part))
    return pieces, size if ends_alone else (tokens[bounds[-1] - 1] - first) * step
