"""Text to speech by models of mlx-audio, an extra of the package. Arrays belong to the model thread.

A piece of text (a sentence) is one step, as a rule: mlx-audio gives its sound as a whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from start_llm.audio.samples import LIBRARY
from start_llm.core.errors import BadRequest
from start_llm.core.limits import SPOKEN
from start_llm.core.media import Sound
from start_llm.models.stepwise import bytes_of, loading


def load_steps(folder: Path, name: str) -> Generator[float, None, Speaker]:
    """Imports the library, which takes seconds; the steps, on the model thread, read weights. Raises NotSupported."""
    importlib.import_module(f"{LIBRARY}.tts.models.soprano")
    load = partial(importlib.import_module(f"{LIBRARY}.tts.utils").load_model, folder, lazy=True)
    return loading("mlx-audio", name, load, Speaker)


class Speaker:
    """A loaded model. Model thread only, but for `nbytes` (what its weights take)."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.nbytes = bytes_of(model)
        self._rate = int(model.sample_rate)

    def speak(self, pieces: Sequence[str]) -> Generator[float, None, Sound]:
        """Each yield: the piece that it is at. Raises BadRequest: it does not come to an end."""
        found: list[np.ndarray] = []
        for index, piece in enumerate(pieces, start=1):
            for result in self._model.generate(text=piece, verbose=False):
                found.append(np.array(result.audio.astype(mx.float32)).reshape(-1))
                if sum(map(len, found)) > SPOKEN.most * self._rate:
                    raise BadRequest(
                        f"input: its speech is longer than {SPOKEN.most:,} seconds; send less text at a time.",
                        param="input",
                        code="limit_exceeded",
                    )
                mx.clear_cache()
                yield float(index)  # mlx-audio may make several sounds of a piece, and each takes its time
        samples = np.concatenate(found) if found else np.zeros(0, np.float32)
        return Sound(np.clip(np.nan_to_num(samples), -1.0, 1.0), self._rate)
