"""What a model's cache layers are, and how their KV is cut, copied and rebuilt.

The only file of this room that knows MLX and mlx-lm's cache classes. Two kinds of layer:

- *cut*: `KVCache` and `QuantizedKVCache` hold one row a token, so a slice of any run of tokens can
  be stored and joined again;
- *state*: `ArraysCache`, `RotatingKVCache`, `ChunkedKVCache` and classes unknown here hold what the
  whole history left behind: they are stored whole, as a checkpoint at one place.

A layer whose `transient` is true is not stored: it is empty after a restore. `CacheList` is looked through. Uses of
mlx-lm's internals: `RotatingKVCache._idx` and `_temporal_order`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from start_llm.kvcache.types import Checkpoint, Form, Slices, StoredRows, Unstorable, Window, WindowPiece

_NO_ROWS: Form = (-1,)  # a cut layer that this model never writes
_ROUND = 64  # the capacity of a restored cache is a multiple of this many tokens
_ROOM_SHARE = 32  # a row that grows gets room for this part of its length
_LEAST_ROOM = 128  # and for at least so many tokens
_AT_ONCE = 16  # while rows grow, at most this part of them is there twice, or one array


class LayerKit:
    """Cuts, saves and rebuilds the caches of one model. Model thread only.

    Args:
        make_cache: makes the model's empty caches (`make_prompt_cache(model)`).

    Attributes:
        new: `make_cache`.
        cuttable: every layer can be cut at any token.
        cut_places: where the layers that can be cut stand among all layers.
    """

    def __init__(self, make_cache: Callable[[], list[Any]]) -> None:
        self.new = make_cache
        empty = list(leaves(make_cache()))
        self._is_cut = tuple(type(leaf) in (KVCache, QuantizedKVCache) for leaf in empty)
        self._is_state = tuple(
            not cut and not getattr(leaf, "transient", False) for cut, leaf in zip(self._is_cut, empty, strict=True)
        )
        self.cuttable = not any(self._is_state)
        self.cut_places = tuple(place for place, cut in enumerate(self._is_cut) if cut)

    def free_buffers(self) -> None:
        """Gives the memory of arrays that are gone back to the system: MLX keeps their buffers otherwise."""
        mx.clear_cache()

    # --- from a live cache --------------------------------------------------

    def slice(self, cache: Sequence[Any], start: int, stop: int) -> Slices:
        """Copies the rows of tokens [start, stop) of every cut layer. Raises Unstorable: a layer is of another class
        than at first, or holds another number of tokens."""
        arrays, forms = [], []
        for leaf in self._leaves_of(cache, cut=True):
            rows, form = _rows(leaf, stop)
            arrays.append(tuple(mx.contiguous(a[..., start:stop, :]) for a in rows))
            forms.append(form)
        return _slices(arrays, forms, stop - start)

    def checkpoint(self, cache: Sequence[Any], before: Checkpoint | None = None) -> Checkpoint:
        """Copies the state of every state layer. Rows of windows are shared with `before`, a checkpoint of a shorter
        prefix of the same tokens. Raises Unstorable: a layer has no state that could be copied."""
        kept = self._leaves_of(cache, cut=False)
        earlier = before.states if before is not None else (None,) * len(kept)
        states = tuple(
            _window(leaf, old) if _is_windowed(leaf) else _copy_state(_state(leaf))
            for leaf, old in zip(kept, earlier, strict=True)
        )
        arrays = _arrays(states)
        pieces = [piece for state in states if isinstance(state, Window) for piece in state.pieces]
        mx.eval(arrays, [piece.arrays for piece in pieces])
        return Checkpoint(states, sum(a.nbytes for a in arrays))

    # --- stored pieces ------------------------------------------------------

    def part(self, rows: StoredRows, start: int, stop: int) -> Slices:
        """The rows [start, stop) of a segment's, with their own buffers."""
        arrays = [tuple(mx.contiguous(a[..., start:stop, :]) for a in layer) for layer in rows.arrays]
        return _slices(arrays, rows.forms, stop - start)

    def parts(self, rows: Sequence[StoredRows], free: Callable[[int], None]) -> list[Slices]:
        """Each of these with buffers of its own; one array of one layer is copied at a time. `free`: see `build`."""
        forms = rows[0].forms
        copies: list[list[tuple[Any, ...]]] = [[] for _ in rows]
        for index in range(len(forms)):
            sources = [list(one.layer(index)) for one in rows]
            free(index)
            made: list[list[Any]] = [[] for _ in rows]
            for column in range(len(sources[0])):
                for source, copied in zip(sources, made, strict=True):
                    copied.append(mx.contiguous(source[column]))
                    source[column] = None
                eval_and_free([copied[column] for copied in made])
            for copy, copied in zip(copies, made, strict=True):
                copy.append(tuple(copied))
        return [_slices(copy, forms, one.length) for one, copy in zip(rows, copies, strict=True)]

    def check_joins(self, before: StoredRows, cache: Sequence[Any]) -> None:
        """Raises Unstorable unless rows of `cache` may follow `before`. Plain and quantised ones may follow each other:
        a row that becomes quantised takes along what it shares with rows that are plain."""
        for old, leaf in zip(before.forms, self._leaves_of(cache, cut=True), strict=True):
            new = _rows(leaf, 0)[1]
            if old != new and (_NO_ROWS in (old, new) or () not in (old, new)):
                raise Unstorable(f"a layer's rows change form from {old} to {new}")

    def build(
        self,
        runs: Sequence[StoredRows],
        checkpoint: Checkpoint | None,
        length: int,
        spare: int = 512,
        free: Callable[[int], None] | None = None,
    ) -> tuple[list[Any], int]:
        """Fresh caches of `length` tokens: the runs joined (the last one cut short), and the checkpoint's state.

        Args:
            runs: consecutive, from token 0; together at least `length` tokens.
            spare: room for this many more tokens, so that the next prefill chunk does not copy all rows again.
            free: is called with the number of each cut layer once its arrays were read. If their owner lets go of them
                there, each of them is freed before the next one is copied.

        Returns:
            The caches, evaluated and shared with nobody, and the bytes copied.
        """
        capacity = -(-(length + spare) // _ROUND) * _ROUND
        forms = [run.forms for run in runs]
        copied, filled, empty = 0, list[Any](), self.new()
        for index, leaf in enumerate(self._leaves_of(empty, cut=True)):
            if length:
                parts = [(list(run.layer(index)), form[index]) for run, form in zip(runs, forms, strict=True)]
                if free is not None:
                    free(index)
                leaf, size = _join(parts, length, capacity, leaf)
                copied += size
            filled.append(leaf)
        cache, restored = self._assembled(empty, filled, checkpoint)
        return cache, copied + restored

    def adopt(
        self, buffers: list[tuple[Any, ...]], forms: Sequence[Form], checkpoint: Checkpoint | None, length: int
    ) -> tuple[list[Any], int]:
        """Caches that write into these very buffers behind their first `length` tokens, and the checkpoint's state.

        Empties the list `buffers`: nobody else may hold them, or the first pass copies them. Returns what `build` does.
        """
        filled, empty = list[Any](), self.new()
        for leaf, form in zip(self._leaves_of(empty, cut=True), forms, strict=True):
            filled.append(_filled(buffers.pop(0), form, length, leaf))
        return self._assembled(empty, filled, checkpoint)

    def _assembled(self, empty: list[Any], filled: list[Any], checkpoint: Checkpoint | None) -> tuple[list[Any], int]:
        """The caches `empty` with these cut layers and the checkpoint's state, and the bytes of that state."""
        states = iter(checkpoint.states if checkpoint is not None else ())
        cut, copied, made = iter(filled), 0, list[Any]()
        for leaf, is_cut, is_state in zip(leaves(empty), self._is_cut, self._is_state, strict=True):
            if is_state and (state := next(states, None)) is not None:
                leaf.state = _rotating_state(state) if isinstance(state, Window) else _copy_state(state)
                mx.eval(_arrays(leaf.state))
                copied += sum(a.nbytes for a in _arrays(leaf.state))
            made.append(next(cut) if is_cut else leaf)
        following = iter(made)
        return [_with_leaves(entry, following) for entry in empty], copied

    # --- the buffers of a row ---------------------------------------------------

    def buffers(self, cache: Sequence[Any]) -> list[tuple[tuple[Any, ...], Form]]:
        """The arrays of each cut layer as they are, and their form. Raises Unstorable, like `slice`."""
        return [_rows(leaf, 0) for leaf in self._leaves_of(cache, cut=True)]

    def buffer(self, layer: Any) -> tuple[Any, ...]:
        """The arrays of one cut layer as they are. Raises Unstorable: it has become another class."""
        return _rows(_cut_layer(layer), 0)[0]

    def take_buffers(self, cache: Sequence[Any], length: int) -> list[tuple[tuple[Any, ...], Form]]:
        """`buffers`, evaluated, of caches that nobody writes into any more, and that are emptied.

        Raises Unstorable: they hold fewer than `length` tokens.
        """
        cut = self._leaves_of(cache, cut=True)
        found = [_rows(leaf, length) for leaf in cut]
        mx.eval([arrays for arrays, _ in found])
        for leaf in cut:
            leaf.keys, leaf.values, leaf.offset = None, None, 0
        return found

    def make_room(self, cache: Sequence[Any], tokens: int) -> None:
        """See `make_room`."""
        make_room(cache, tokens)

    # --- to and from plain buffers (the disk tier) ---------------------------

    def pack(self, piece: StoredRows | Checkpoint) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
        """Copies into numpy buffers, with a JSON text that `unpack` needs."""
        buffers: dict[str, np.ndarray[Any, Any]] = {}
        dtypes: dict[str, str] = {}

        def put(a: Any) -> dict[str, str]:
            name = f"a{len(buffers)}"
            dtypes[name] = str(a.dtype).removeprefix("mlx.core.")
            buffers[name] = np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)
            return {"array": name}

        if isinstance(piece, Checkpoint):
            meta: dict[str, Any] = {"kind": "checkpoint", "tree": _encode(list(piece.states), put)}
        else:
            tree = _encode([list(layer) for layer in piece.arrays], put)
            meta = {"kind": "slices", "tree": tree, "forms": piece.forms, "length": piece.length}
        return buffers, json.dumps({**meta, "dtypes": dtypes})

    def unpack(self, buffers: dict[str, np.ndarray[Any, Any]], meta: str) -> Slices | Checkpoint:
        """The reverse of `pack`. Raises ValueError or KeyError if `meta` does not fit the buffers."""
        said = json.loads(meta)

        def get(name: str) -> Any:
            a = mx.array(buffers[name])
            a = a.view(mx.bfloat16) if said["dtypes"][name] == "bfloat16" else a
            mx.eval(a)
            return a

        tree = _decode(said["tree"], get)
        layers = sum(self._is_cut if said["kind"] == "slices" else self._is_state)
        if len(tree) != layers:
            raise ValueError(f"{len(tree)} layers, not {layers}")
        if said["kind"] == "slices":
            return _slices([tuple(layer) for layer in tree], [tuple(f) for f in said["forms"]], int(said["length"]))
        return Checkpoint(tuple(tree), sum(a.nbytes for a in _arrays(tree)))

    # --- helpers --------------------------------------------------------------

    def _leaves_of(self, cache: Sequence[Any], *, cut: bool) -> list[Any]:
        """The layers that can be cut, or those that cannot. Raises Unstorable: a layer has become another class."""
        found = list(leaves(cache))
        if len(found) != len(self._is_cut):
            raise Unstorable(f"{len(found)} cache layers, but the model makes {len(self._is_cut)}")
        for leaf, is_cut in zip(found, self._is_cut, strict=True):
            if is_cut:
                _cut_layer(leaf)
        return [leaf for leaf, wanted in zip(found, self._is_cut if cut else self._is_state, strict=True) if wanted]


def _cut_layer(leaf: Any) -> Any:
    """The same, if it can be cut. Raises Unstorable."""
    if type(leaf) not in (KVCache, QuantizedKVCache):
        raise Unstorable(f"a layer became {type(leaf).__name__}")
    return leaf


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The layers' caches, those inside of lists included."""
    for entry in cache:
        if isinstance(entry, CacheList):
            yield from leaves(entry.caches)
        else:
            yield entry


def held_tokens(cache: Sequence[Any]) -> int:
    """Tokens in a row's KV, 0 if no layer counts them (`ArraysCache` does not)."""
    return max((leaf.offset for leaf in leaves(cache) if isinstance(getattr(leaf, "offset", None), int)), default=0)


def _with_leaves(entry: Any, following: Iterator[Any]) -> Any:
    if isinstance(entry, CacheList):
        return CacheList(*(_with_leaves(inner, following) for inner in entry.caches))
    return next(following)


def _rows(leaf: Any, stop: int) -> tuple[tuple[Any, ...], Form]:
    """All row arrays of a cut layer, tokens on axis -2, and their form."""
    if leaf.keys is None:
        return (), _NO_ROWS
    if leaf.offset < stop:
        raise Unstorable(f"a layer holds {leaf.offset} tokens where {stop} were said to be")
    return arrays_of(leaf), (leaf.group_size, leaf.bits) if isinstance(leaf, QuantizedKVCache) else ()


def _slices(arrays: Sequence[tuple[Any, ...]], forms: Sequence[Form], length: int) -> Slices:
    flat = [a for layer in arrays for a in layer]
    mx.eval(flat)
    return Slices(list(arrays), tuple(forms), length, sum(a.nbytes for a in flat))


def _join(runs: Sequence[tuple[list[Any], Form]], length: int, capacity: int, empty: Any) -> tuple[Any, int]:
    """One cut layer from its runs, evaluated array by array, and the bytes copied. The runs' lists are emptied.

    Plain runs beside quantised ones are quantised as mlx-lm would have done.
    """
    form = max((form for _, form in runs), key=len)
    if form == _NO_ROWS:
        return empty, 0
    if form:
        quantised = partial(mx.quantize, group_size=form[0], bits=form[1])
        runs = [(rows if f else [part for a in rows for part in quantised(a)], form) for rows, f in runs]
    joined = list[Any]()
    while runs[0][0]:
        parts = [rows.pop(0) for rows, _ in runs]
        excess = sum(p.shape[-2] for p in parts) - length
        if excess:
            parts[-1] = parts[-1][..., : parts[-1].shape[-2] - excess, :]
        *outer, _, width = parts[0].shape
        room = mx.zeros((*outer, capacity - length, width), dtype=parts[0].dtype)
        joined.append(mx.concatenate([*parts, room], axis=-2))
        del parts
        eval_and_free(joined[-1])
    copied = sum(a.nbytes // capacity * length for a in joined)
    return _filled(joined, form, length, empty), copied


def _filled(arrays: Sequence[Any], form: Form, length: int, empty: Any) -> Any:
    """A cut layer that holds `length` tokens in these arrays."""
    if form == _NO_ROWS or not arrays:
        return empty
    layer = QuantizedKVCache(group_size=form[0], bits=form[1]) if form else KVCache()
    set_arrays(layer, arrays)
    layer.offset = length
    return layer


def make_room(cache: Sequence[Any], tokens: int) -> None:
    """Makes sure that a pass over so many tokens finds room in each cut layer, and copies few arrays at a time for it.

    mlx-lm's own growth copies all layers in the pass. Room grows with the row, so that a long one is rarely copied.
    """
    cut = [leaf for leaf in leaves(cache) if type(leaf) in (KVCache, QuantizedKVCache)]
    grow_for([(leaf, leaf.offset) for leaf in cut], tokens)


def grow_for(layers: Sequence[tuple[Any, int]], tokens: int) -> None:
    """Gives each of these layers room for so many tokens behind those that it holds, and for some more.

    Few arrays at a time are there twice: they are freed before the next ones are copied.
    """
    growing = [(layer, held) for layer, held in layers if layer.keys is not None and _room(layer) < held + tokens]
    most = sum(a.nbytes for layer, _ in growing for a in arrays_of(layer)) // _AT_ONCE
    copies, nbytes = list[Any](), 0
    for layer, held in growing:
        arrays = list(arrays_of(layer))
        layer.keys = layer.values = None
        try:
            for place, a in enumerate(arrays):
                *outer, _, width = a.shape
                room = mx.zeros((*outer, room_behind(held, tokens), width), a.dtype)
                arrays[place] = mx.concatenate([a[..., :held, :], room], axis=-2)
                copies.append(arrays[place])
                nbytes += a.nbytes
                del a, room
                if nbytes >= most:
                    eval_and_free(copies)
                    copies, nbytes = [], 0
        finally:
            set_arrays(layer, arrays)
    if copies:
        eval_and_free(copies)


def room_behind(held: int, tokens: int) -> int:
    """Room that a layer of `held` tokens gets for a pass over `tokens` more, and for what follows."""
    return -(-(tokens + max(_LEAST_ROOM, held // _ROOM_SHARE)) // _ROUND) * _ROUND


def _room(layer: Any) -> int:
    """Tokens that a layer has room for: of its last array, for that one grows last."""
    return int(arrays_of(layer)[-1].shape[-2])


def eval_and_free(*arrays: Any) -> None:
    """Evaluates these, and gives back the memory of what they were made of."""
    mx.eval(*arrays)
    mx.clear_cache()


def arrays_of(layer: Any) -> tuple[Any, ...]:
    """The arrays of a cut layer, or of a batch of such layers; none if it is empty."""
    if layer.keys is None:
        return ()
    return (*layer.keys, *layer.values) if isinstance(layer.keys, tuple | list) else (layer.keys, layer.values)


def set_arrays(layer: Any, arrays: Sequence[Any]) -> None:
    """Gives a layer the arrays that `arrays_of` returns."""
    half = len(arrays) // 2
    layer.keys, layer.values = arrays if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))


def _state(leaf: Any) -> Any:
    """A layer's state."""
    try:
        return leaf.state
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise Unstorable(f"{type(leaf).__name__} has no readable state: {error}") from error


def _is_windowed(leaf: Any) -> bool:
    return type(leaf) is RotatingKVCache and not leaf.keep and leaf.keys is not None


def _window(leaf: Any, before: Any) -> Window:
    """A rotating layer's window, in temporal order: what `before` has of it, and a copy of the rest (not evaluated)."""
    keys, values = leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)
    rows = keys.shape[2]
    start = leaf.offset - min(leaf.max_size, rows)
    shared: tuple[WindowPiece, ...] = ()
    at = start
    if isinstance(before, Window) and before.start <= start <= before.offset < leaf.offset:
        shared = tuple(piece for piece in before.pieces if piece.stop > start)
        at = before.offset
    first = rows - (leaf.offset - at)
    rows = mx.contiguous(keys[..., first:, :]), mx.contiguous(values[..., first:, :])
    new = WindowPiece(at, leaf.offset, rows, rows[0].nbytes + rows[1].nbytes)
    return Window((*shared, new), start, leaf.offset, leaf.max_size)


def _rotating_state(window: Window) -> tuple[Any, ...]:
    """The state of a `RotatingKVCache` with these rows, in new arrays (not evaluated)."""
    cut = [max(0, window.start - piece.start) for piece in window.pieces]
    joined = [
        mx.contiguous(
            mx.concatenate([p.arrays[i][..., c:, :] for p, c in zip(window.pieces, cut, strict=True)], axis=2)
        )
        for i in (0, 1)
    ]
    return *joined, window.offset, 0, window.size, window.offset - window.start


def _copy_state(state: Any) -> Any:
    """A deep copy: new lists, and for every array a new one that pins no larger buffer (not evaluated yet)."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, mx.array):
            return mx.contiguous(leaf)
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        raise Unstorable(f"a cache's state holds a {type(leaf).__name__}")

    return tree_map(copy, state)


def _arrays(tree: Any) -> list[Any]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def _encode(tree: Any, put: Callable[[Any], dict[str, str]]) -> Any:
    if isinstance(tree, mx.array):
        return put(tree)
    if isinstance(tree, Window):
        keys, values, *_ = _rotating_state(tree)
        return {"window": [tree.start, tree.offset, tree.size], "rows": [put(keys), put(values)]}
    if isinstance(tree, tuple):
        return {"tuple": [_encode(item, put) for item in tree]}
    if isinstance(tree, list):
        return [_encode(item, put) for item in tree]
    if isinstance(tree, dict):
        return {"dict": [[key, _encode(item, put)] for key, item in tree.items()]}
    return tree


def _decode(tree: Any, get: Callable[[str], Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return get(tree["array"])
    if "window" in tree:
        start, offset, size = tree["window"]
        keys, values = (_decode(rows, get) for rows in tree["rows"])
        return Window((WindowPiece(start, offset, (keys, values), keys.nbytes + values.nbytes),), start, offset, size)
    if "tuple" in tree:
        return tuple(_decode(item, get) for item in tree["tuple"])
    return {key: _decode(item, get) for key, item in tree["dict"]}
