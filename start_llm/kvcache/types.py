"""What this room passes around: stored rows, checkpoints, plans, settings, figures. No MLX: arrays are opaque here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it knows this module
    from start_llm.kvcache.rows import Run

KVReader = Callable[[int | None], Sequence[Any]]
"""Gives a row's layers as they are now, or the one in that place; not to be written into, nor to be kept."""


class Unstorable(Exception):
    """This cache cannot be stored; the message says why."""


class RowForm(NamedTuple):
    """How a layer holds its rows."""

    columns: tuple[int, ...] = ()  # those of its kind that have rows; none: it has no rows, or none is stored
    rate: int = 0  # tokens for which there is one row; 0: unknown
    group_size: int = 0
    bits: int = 0  # 0: keys and values are not quantised

    def rows(self, start: int, stop: int, base: int = 0) -> slice:
        """The rows of the tokens [start, stop), in arrays that begin with those of the token `base`."""
        if (rate := self.rate) == 1:
            return slice(start - base, stop - base)
        return slice(start // rate - base // rate, stop // rate - base // rate) if rate else slice(0, 0)


@dataclass(frozen=True, slots=True)
class Slices:
    """The rows of the tokens [start, start + length). Every array is evaluated and owns its buffer."""

    # A tuple a layer: (keys, values), each [1, heads, length, dim]; or for quantised rows (keys, scales, biases,
    # values, scales, biases); or what else the layer's kind has (`kinds`).
    arrays: list[tuple[Any, ...]]  # emptied layer by layer when a request takes them over
    forms: tuple[RowForm, ...]  # a layer each
    start: int
    length: int
    nbytes: int
    count: int = 0  # of buffers: of the arrays, or fewer if these are parts of larger ones
    packed: bool = False  # they are (see `packing`), or large enough as they are

    def layer(self, index: int) -> tuple[Any, ...]:
        return self.arrays[index]

    def free_layer(self, index: int) -> None:
        self.arrays[index] = ()


type StoredRows = Slices | Run
"""The KV of a run of tokens."""


@dataclass(slots=True, eq=False)
class WindowPiece:
    """Rows [start, stop) of one windowed layer. Checkpoints whose windows overlap share it."""

    start: int
    stop: int
    arrays: tuple[Any, Any]  # keys and values, each [1, heads, stop - start, dim]
    nbytes: int
    holders: int = 0  # checkpoints in the store that need it
    count: int = 2  # of buffers; 0: those of another piece, which comes and goes with this one
    packed: bool = False  # its arrays are parts of larger ones: see `packing`


@dataclass(frozen=True, slots=True)
class Window:
    """A windowed layer's state: the rows [start, offset), at most `size`; the first piece may begin before `start`."""

    pieces: tuple[WindowPiece, ...]
    start: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of every layer that has one, at one place. Its bytes do not depend on how many tokens stand before."""

    states: tuple[Any, ...]  # a `Window` each, or nested tuples and lists of arrays and plain values
    own_bytes: int  # of the arrays that no other checkpoint shares
    own_arrays: int = 0  # how many buffers these are
    packed: bool = False  # its arrays are parts of larger ones: see `packing`

    def pieces(self) -> Iterator[WindowPiece]:
        for state in self.states:
            if isinstance(state, Window):
                yield from state.pieces

    @property
    def nbytes(self) -> int:
        """Its own bytes and its share of the pieces."""
        return self.own_bytes + sum(piece.nbytes // max(piece.holders, 1) for piece in self.pieces())

    @property
    def all_arrays(self) -> int:
        """Its own and those that it shares."""
        return self.own_arrays + sum(piece.count for piece in self.pieces())

    def count(self, sign: int) -> tuple[int, int]:
        """Counts it in (1) or out (-1). Returns the bytes and arrays by which that changes what is held."""
        nbytes, arrays = self.own_bytes, self.own_arrays
        for piece in self.pieces():
            piece.holders += sign
            if piece.holders == max(sign, 0):
                nbytes, arrays = nbytes + piece.nbytes, arrays + piece.count
        return sign * nbytes, sign * arrays


@dataclass(frozen=True, slots=True)
class FilePart:
    """Where the disk tier has a segment's rows: from row `first` on in the file `name`."""

    name: str
    first: int = 0


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What `KVStore.lookup` found; changes nothing."""

    length: int  # tokens that can be restored, at most the caller's limit
    matched: int  # tokens that equal a stored path with KV, restorable or not
    seen: int  # tokens that equal anything this store ever held, evicted or not
    reason: str = ""  # why `length` < `seen`: ``""``, ``limit``, ``no_checkpoint`` or ``evicted``
    behind: tuple[int, ...] = ()  # the first tokens that are stored behind `seen`; empty: nothing is


@dataclass(frozen=True, slots=True)
class Restored:
    """Fresh mlx-lm caches of `length` tokens, evaluated; the caller may write into them."""

    cache: list[Any]
    length: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class StoredEnd:
    """What is known about the place at which stored KV ends."""

    session: str | None = None  # the conversation that it is an end of, as its owner calls it
    owner: str | None = None  # who asks; two owners may call a conversation the same
    one_shot: bool = False  # a side request; it is evicted before anything else
    seconds_per_token: float = 0.0  # measured cost of computing the new tokens; 0: unknown
    checkpoint: bool = True  # the state of layers that cannot be cut is saved, too
    system_end: bool = False  # tools and system text end here: the checkpoint is kept longer than others
    states: Sequence[tuple[int, Sequence[Any]]] = ()  # layers after so many tokens: more checkpoints
    # A turn of the conversation is over, so checkpoints that it has outgrown are given up. Else this is a part of it,
    # or a guess of the next one.
    answered: bool = True
    calls: bool | None = None  # the answer of that turn calls tools, so the client comes back by itself; None: unknown


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What a store may keep."""

    budget_bytes: int  # most bytes of KV in memory, at first (`KVStore.set_budget` changes it)
    checkpoints_recent: int = 8  # message boundaries near the end that keep a checkpoint
    checkpoint_grid: int = 1024  # most tokens between two restore points in a long run
    # PROMPT_CACHE_... settings; 0: no limit
    ttl_seconds: float = 0
    session_idle_seconds: float = 1800
    sessions_keep: int = 2
    most_arrays: int = 0  # in memory: the device has room for so many buffers, however small they are; 0: no limit
    ghost_tokens: int = 4_000_000  # most tokens remembered after their KV was evicted
