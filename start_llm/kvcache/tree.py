"""The tree of stored prefixes: one path a token sequence, common prefixes shared. Knows no MLX.

The idea is that of a radix tree: a segment is a run of tokens, and its children begin with different tokens. A walk
compares raw tokens, so a match is exact, and no hash decides what is served. Where a new sequence leaves a path inside
a segment, that segment is divided, its rows with it. KV is given up leaf first, because the KV of a token is of no use
without all tokens before it. What was given up leaves its tokens behind: then a later miss can be explained as an
eviction, and a copy on disk still has its place. Invariants:
- no two children of a segment begin with the same token, so a walk is exact and needs no search;
- a segment that holds KV has a parent that does (or the root): KV goes leaf first;
- a segment without KV is a *ghost*: it remembers that this text was here once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from start_llm.kvcache.blocks import PathHash, Tokens, common_prefix
from start_llm.kvcache.types import Checkpoint, FilePart, StoredRows

_TOKEN = 4  # bytes
_PEEK_PAUSE = 0.0005  # seconds between two tries to look at a tree that is being changed


@dataclass(slots=True, eq=False)
class Segment:
    """A run of tokens behind its parent's. Changed by `SegmentTree` and `KVStore` only."""

    raw: bytes  # the tokens, int32 in native order, at least one (none in the root)
    start: int  # offset of the first token in every sequence through here
    parent: Segment | None
    children: dict[int, Segment]  # by their first token
    rows: StoredRows | None = None  # KV of exactly these tokens, ``None`` in a ghost
    checkpoint: Checkpoint | None = None  # state of the layers that cannot be cut, at the segment's end
    # where the disk tier has copies
    file: FilePart | None = None
    checkpoint_file: str | None = None
    seconds_per_token: float = 0.0  # measured cost of computing these tokens
    uses: int = 0  # times that a request restored or stored through here
    used: float = 0.0  # clock of the last time
    landed: int = 0  # restores that ended exactly here
    head: bool = False  # a tools+system block ends here
    one_shot: bool = False  # only side requests went through here
    path_hash: PathHash | None = None  # of the whole path up to the segment's end, where it was asked for

    @property
    def tokens(self) -> Tokens:
        return np.frombuffer(self.raw, np.int32)

    @property
    def length(self) -> int:
        return len(self.raw) // _TOKEN

    @property
    def end(self) -> int:
        return self.start + len(self.raw) // _TOKEN

    @property
    def first(self) -> int:
        """The first token: the key among its parent's children."""
        return int.from_bytes(self.raw[:_TOKEN], sys.byteorder, signed=True)

    @property
    def nbytes(self) -> int:
        return self.checkpoint_bytes + (0 if self.rows is None else self.rows.nbytes)

    @property
    def checkpoint_bytes(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.nbytes

    @property
    def has_state(self) -> bool:
        """There is a checkpoint at its end, in memory or on disk."""
        return self.checkpoint is not None or self.checkpoint_file is not None

    @property
    def is_ghost(self) -> bool:
        """Only the tokens are left."""
        return self.rows is None and self.file is None

    @property
    def is_leaf(self) -> bool:
        """Holds KV and no child does."""
        return self.rows is not None and not any(child.rows is not None for child in self.children.values())

    def ancestors(self) -> Iterator[Segment]:
        """From the parent up, without the root."""
        above = self.parent
        while above is not None and above.parent is not None:
            yield above
            above = above.parent


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How far a sequence follows the tree."""

    path: tuple[Segment, ...]  # segments from the top; the last may match in part
    length: int  # tokens that match

    @property
    def parted(self) -> bool:
        """The sequence leaves the path inside the last segment."""
        return bool(self.path) and self.length < self.path[-1].end


class SegmentTree:
    """Segments by token path. Not thread-safe: changed and read by one thread; others may only `read_consistently`.

    Args:
        divide: a segment's rows, the first ones and the others.
        longest: a new run is divided into segments of at most this many tokens, so that eviction,
            division and files stay small.
    """

    def __init__(self, divide: Callable[[StoredRows, int], tuple[StoredRows, StoredRows]], longest: int = 2048) -> None:
        self.root = Segment(b"", 0, None, {})
        self._divide = divide
        self._longest = longest
        self._begun = self._ended = 0  # changes; they differ while there is one

    @property
    def changes(self) -> int:
        """How often it was changed."""
        return self._ended

    def read_consistently[T](self, read: Callable[[], T], seconds: float = 1.0) -> T:
        """What `read` returns, which only reads this tree; for other threads than the owner's.

        Nobody waits: the owner goes on, and what it changed meanwhile is read again. Raises TimeoutError: the tree was
        being changed for all of the `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            begun = self._begun
            if begun == self._ended:
                try:
                    found = read()
                except Exception as error:  # a dictionary that grows under the look: what was added is seen next time
                    if begun == self._begun and not isinstance(error, RuntimeError):
                        raise
                else:
                    if begun == self._begun:
                        return found
            time.sleep(_PEEK_PAUSE)
        raise TimeoutError("the tree of stored prefixes is being changed all the time")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """While segments do not fit together. (One that is added or taken out does no harm to a reader.)"""
        self._begun += 1
        try:
            yield
        finally:
            self._ended += 1

    def __iter__(self) -> Iterator[Segment]:
        """Every segment, parents first, without the root."""
        todo = list(self.root.children.values())
        while todo:
            segment = todo.pop()
            yield segment
            todo.extend(segment.children.values())

    def walk(self, tokens: Tokens) -> PrefixMatch:
        """The longest path that `tokens` follows. Changes nothing."""
        raw, total = tokens.tobytes(), len(tokens)
        path: list[Segment] = []
        at, here = 0, self.root
        while at < total:
            below = here.children.get(int(tokens[at]))
            if below is None:
                break
            path.append(below)
            # Comparing bytes costs a tenth of what numpy's comparison of two short arrays does.
            if not raw.startswith(below.raw, at * _TOKEN):
                at += common_prefix(below.tokens, tokens[at : at + below.length])
                break
            at = below.end
            here = below
        return PrefixMatch(tuple(path), at)

    def below(self, tokens: Tokens, length: int) -> list[Segment]:
        """All that stands behind the first `length` of `tokens`, lowest first; a segment across it is divided."""
        for segment in self.walk(tokens).path:
            if segment.end > length:
                if segment.start < length:
                    self.split(segment, length - segment.start)
                found = [segment]
                for here in found:
                    found.extend(here.children.values())
                return found[::-1]
        return []

    def extend(self, tokens: Tokens) -> list[Segment]:
        """The path of exactly `tokens`, top first: what is missing is added as ghosts, a segment that it leaves is
        divided."""
        match = self.walk(tokens)
        path: list[Segment] = []
        for segment in match.path:
            if segment.end > match.length:
                segment = self.split(segment, match.length - segment.start)
            while segment.is_ghost and segment.length > self._longest:  # joined ghosts are about to hold KV again
                path.append(self.split(segment, self._longest))
            path.append(segment)
        here = path[-1] if path else self.root
        for at in range(match.length, len(tokens), self._longest):
            new = Segment(tokens[at : at + self._longest].tobytes(), at, here, {})
            here.children[new.first] = new
            path.append(new)
            here = new
        return path

    def split(self, segment: Segment, at: int) -> Segment:
        """Divides after `at` of the segment's tokens (0 < at < its length). `segment` stays the lower part; returns the
        new upper one."""
        above = segment.parent
        assert above is not None and 0 < at < segment.length
        with self._changing():
            upper = Segment(segment.raw[: at * _TOKEN], segment.start, above, {})
            if segment.rows is not None:
                upper.rows, segment.rows = self._divide(segment.rows, at)
            upper.seconds_per_token, upper.uses = segment.seconds_per_token, segment.uses
            upper.used, upper.one_shot = segment.used, segment.one_shot
            if segment.file is not None:
                upper.file = segment.file
                segment.file = FilePart(segment.file.name, segment.file.first + at)
            segment.raw = segment.raw[at * _TOKEN :]
            segment.start += at
            segment.parent = upper
            upper.children[segment.first] = segment
            above.children[upper.first] = upper
        return upper

    def attach(self, above: Segment, raw: bytes) -> Segment | None:
        """Adds a ghost of these tokens below `above`; ``None`` if another child begins alike."""
        made = Segment(raw, above.end, above, {})
        if made.first in above.children:
            return None
        above.children[made.first] = made
        return made

    def absorb(self, segment: Segment) -> None:
        """Joins a ghost with its only child, if that is one too and neither is on disk: ghosts need no joints."""
        if len(segment.children) != 1 or not segment.is_ghost:
            return
        (child,) = segment.children.values()
        if child.is_ghost:
            with self._changing():
                segment.raw += child.raw
                segment.path_hash = child.path_hash
                segment.used = max(segment.used, child.used)
                segment.children = child.children
                for below in segment.children.values():
                    below.parent = segment

    def remove(self, segment: Segment) -> None:
        """Takes out a ghost without children."""
        assert segment.parent is not None and forgettable(segment)
        del segment.parent.children[segment.first]
        segment.parent = None


def forgettable(segment: Segment) -> bool:
    """A ghost without children."""
    return segment.is_ghost and not segment.children


def path_hash(segment: Segment) -> PathHash:
    """Of all tokens up to the segment's end; remembered along the way. Hashes nothing."""
    todo: list[Segment] = []
    here: Segment | None = segment
    while here is not None and here.path_hash is None:
        todo.append(here)
        here = here.parent
    found = None if here is None else here.path_hash
    for each in reversed(todo):
        each.path_hash = found = PathHash(found, each.raw)
    assert found is not None
    return found
