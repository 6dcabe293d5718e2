"""Which weights are in memory already, so that a model with another adapter shares them. Knows no MLX."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """A checkpoint's arrays as a text model has them, without an adapter. Whoever computes with them holds this.

    Attributes:
        group: what those who share them are counted under.
        files: `fingerprint.fingerprint` of it when it was read.
        arrays: by the parameter's name. They belong to the model thread.
    """

    group: str
    files: str
    arrays: dict[str, Any]
    nbytes: int


class BasesInMemory:
    """By `group_of` their folder. What no model holds is not here. Filled by the model thread; any thread may look."""

    def __init__(self) -> None:
        self._bases: weakref.WeakValueDictionary[str, BaseWeights] = weakref.WeakValueDictionary()

    def find(self, key: str) -> BaseWeights | None:
        return self._bases.get(key)

    def add(self, key: str, base: BaseWeights) -> None:
        self._bases[key] = base


def group_of(folder: Path) -> str:
    """Links resolved: two names of one folder are one checkpoint."""
    return os.path.realpath(folder)
