"""Token sequences as arrays: conversion, comparison, and the hash chain that names a prefix.

A prefix is named by its SHA-256. SHA-256 is itself a chain over 64-byte blocks, and 64 bytes are
16 int32 tokens: a running hasher is the chain of 16-token blocks, its copies are the links.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
TokenSequence = Sequence[int] | Tokens


def as_tokens(tokens: TokenSequence) -> Tokens:
    """An int32 array; an array that is one already is returned as it is."""
    if isinstance(tokens, np.ndarray):
        return np.ascontiguousarray(tokens, dtype=np.int32)
    # array.array takes two thirds of the time of np.array on a long tuple.
    return np.frombuffer(array("i", tokens), dtype=np.int32)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    # Most comparisons end at once or run far: look at a short piece before the whole.
    head = min(n, 64)
    differs = a[:head] != b[:head]
    if differs.any():
        return int(differs.argmax())
    differs = a[head:n] != b[head:n]
    return head + int(differs.argmax()) if differs.any() else n


class PathHash:
    """The SHA-256 of all tokens up to a place, however the path is divided. Any thread computes it when it is needed.

    So the model thread names a prefix without hashing it.
    """

    __slots__ = ("_above", "_chain", "_raw")

    def __init__(self, above: PathHash | None = None, raw: bytes = b"") -> None:
        """Of `raw`, tokens as int32 in native order, behind all those of `above`."""
        self._above, self._raw = above, raw
        self._chain: hashlib._Hash | None = None

    def chain(self) -> hashlib._Hash:
        """Remembered, here and on the way. Not to be updated."""
        todo: list[tuple[PathHash, bytes]] = []
        here: PathHash | None = self
        chain = hashlib.sha256()
        while here is not None:
            above, raw = here._above, here._raw
            if here._chain is not None:  # read last: another thread sets it before it gives up the other two
                chain = here._chain
                break
            todo.append((here, raw))
            here = above
        for here, raw in reversed(todo):
            chain = chain.copy()
            chain.update(np.ascontiguousarray(np.frombuffer(raw, np.int32), dtype="<i4"))
            here._chain = chain
            here._above, here._raw = None, b""
        return chain
