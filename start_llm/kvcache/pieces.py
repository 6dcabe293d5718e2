"""The nouns of this room: stored rows, checkpoints, plans. No MLX: arrays are opaque here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Form = tuple[int, ...]
"""How a layer's rows are held: () plain, (group_size, bits) quantised."""


class Unstorable(Exception):
    """This cache cannot be stored; the message says why."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The rows of a run of tokens, one tuple of arrays a cut layer. Every array is evaluated and owns its buffer.

    Attributes:
        arrays: per cut layer (keys, values), each [1, heads, length, dim], or for quantised rows
            (keys, scales, biases, values, scales, biases).
        forms: per cut layer.
        length: tokens.
        nbytes: of all arrays.
    """

    arrays: tuple[tuple[Any, ...], ...]
    forms: tuple[Form, ...]
    length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of every state layer at one place: nested lists of arrays and plain values."""

    states: tuple[Any, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """Where the disk tier has a segment's rows: from row `first` on in the file `name`."""

    name: str
    first: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What `KVStore.lookup` found; changes nothing.

    Attributes:
        length: tokens that can be restored, at most the caller's limit.
        matched: tokens that equal a stored path with KV, restorable or not.
        seen: tokens that equal anything this store ever held, evicted or not.
        reason: why `length` < `seen`: ``""``, ``limit``, ``no_checkpoint`` or ``evicted``.
    """

    length: int
    matched: int
    seen: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """Fresh mlx-lm caches of `length` tokens, evaluated; the caller may write into them."""

    cache: list[Any]
    length: int
    copied_bytes: int
