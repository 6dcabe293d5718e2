"""What the vision tower made of images, by identity: in memory, and in files that outlive the process.

A file is a cache: one that is missing, damaged or of another form is not there. It begins with the SHA-256 of the rest,
which is in the format of safetensors. Model thread only.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from start_llm.files.atomic import write_atomic
from start_llm.files.lru import Lru

log = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20
MOST_DISK_BYTES = 1 << 30
_SUFFIX = ".features"
_DIGEST_BYTES = 32
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Features:
    """What the vision tower made of an image."""

    rows: mx.array  # [tokens, width], as the language model takes them
    deep: tuple[mx.array, ...]  # per early layer [tokens, width], added there (deepstack); empty for most models
    grid: tuple[int, int] | None  # rows and columns of its tokens, ``None`` where positions just go on

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + sum(layer.nbytes for layer in self.deep))


class FeatureStore:
    """Of the files, those that were used least lately go first.

    Args:
        memory_bytes: most bytes in memory; the image used last stays whatever it takes.
        folder: of the files (made if missing); ``None``: in memory only.
        disk_bytes: most bytes of files, of all models together.
        model: names the model whose features these are.
    """

    def __init__(
        self, memory_bytes: int = MEMORY_BYTES, folder: Path | None = None, disk_bytes: int = 0, *, model: str = ""
    ) -> None:
        self._model, self._disk_bytes = model, disk_bytes
        self._held: Lru[str, Features] = Lru(memory_bytes, lambda _, features: features.nbytes)
        self._folder = folder if disk_bytes > 0 else None
        self._warned = False

    def get(self, key: str, make: Callable[[], Features]) -> Features:
        """The features of the image that `key` names; made if they are nowhere."""
        found = self._held.get(key)
        if found is not None:
            return found
        if self._folder is None:
            found = make()
        else:
            name = hashlib.sha256(json.dumps([self._model, key]).encode()).hexdigest()
            path = self._folder / (name + _SUFFIX)
            found = _read(path)
            if found is None:
                found = make()
                self._write(path, found)
        self._held.put(key, found)
        return found

    def _write(self, path: Path, features: Features) -> None:
        data = _packed(features)
        if len(data) > self._disk_bytes:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(path.parent, len(data))
            write_atomic(path, data)
        except OSError as error:
            if not self._warned:
                log.warning("image features are kept in memory only: %s", error)
            self._warned = True

    def _make_room(self, folder: Path, new: int) -> None:
        """For so many bytes more; what a killed process left half written goes too, when it is the oldest."""
        files = []
        for entry in os.scandir(folder):
            with suppress(OSError):  # another server has removed it
                if entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    files.append((about.st_mtime, about.st_size, entry.path))
        together = sum(size for _, size, _ in files) + new
        for _, size, path in sorted(files):
            if together <= self._disk_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            together -= size


def _read(path: Path) -> Features | None:
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        data = content[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != content[:_DIGEST_BYTES]:
            raise ValueError("wrong checksum")
        loaded = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
        arrays, about = cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
        rows, *deep = [arrays[str(index)] for index in range(len(arrays))]
        mx.eval(rows, *deep)
        grid = json.loads(about["grid"])
        found = Features(rows, tuple(deep), None if grid is None else (grid[0], grid[1]))
        os.utime(path)
    except _DAMAGE as error:
        log.warning("a file of image features is damaged and is removed: %s: %s", path.name, error)
        with suppress(OSError):
            path.unlink()
        return None
    return found


def _packed(features: Features) -> bytes:
    buffer = io.BytesIO()
    arrays = {str(index): array for index, array in enumerate((features.rows, *features.deep))}
    mx.save_safetensors(buffer, arrays, {"grid": json.dumps(features.grid)})
    data = buffer.getvalue()
    return hashlib.sha256(data).digest() + data
