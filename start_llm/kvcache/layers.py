"""How the KV of a model's cache layers is cut, copied and rebuilt.

Beside `packing` the only file of this room that computes with MLX. What each class of layers holds stands in `kinds`:
columns, of which any run of tokens can be stored and joined again, and a small state, of which checkpoints hold copies.
A layer whose `transient` is true is not stored: it is empty after a restore. `CacheList` is looked through. Uses of
upstream's internals: `RotatingKVCache._idx` and `_temporal_order`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from start_llm.kvcache.kinds import NO_ROWS, PLAIN, Kind, kind_of, leaves, with_leaves
from start_llm.kvcache.packing import packed, packed_rows
from start_llm.kvcache.types import Checkpoint, RowForm, Slices, StoredRows, Unstorable, Window, WindowPiece

_ROUND = 64  # the capacity of a restored cache is a multiple of this many tokens
_ROOM_SHARE = 32  # a row that grows gets room for this part of its length
_LEAST_ROOM = 128  # and for at least so many tokens
_FEW_BYTES = 1 << 20  # of arrays that are made and evaluated together: each time is a wait for the device
_LARGE = 2 << 20  # bytes of an array: of larger ones there are so few that they need not be packed
_AT_ONCE = 16  # while rows grow, at most this part of them is there twice, or one array

Buffers = tuple[tuple[Any, ...], RowForm]
"""The arrays of a layer's columns, and how they hold its rows."""


class LayerKit:
    """Cuts, saves and rebuilds the caches of one model. Model thread only.

    Args:
        make_cache: makes the model's empty caches (`make_prompt_cache(model)`).

    Attributes:
        new: `make_cache`.
        free_buffers: gives the memory of arrays that are gone back to the system: MLX keeps their buffers otherwise.
        cuttable: every layer can be cut at any token.
    """

    packed, packed_rows = staticmethod(packed), staticmethod(packed_rows)

    def __init__(self, make_cache: Callable[[], list[Any]]) -> None:
        self.new, self.free_buffers = make_cache, mx.clear_cache
        empty = make_cache()
        self._kinds = tuple(map(kind_of, leaves(empty)))
        self._keeps = tuple(
            bool(kind.state) and not getattr(leaf, "transient", False)
            for kind, leaf in zip(self._kinds, leaves(empty), strict=True)
        )
        self._entries = tuple(number for number, entry in enumerate(empty) for _ in leaves([entry]))
        # A layer beside others in a list may fall behind: then the model makes its rows again of theirs (glm5_next).
        self._beside = tuple(self._entries.count(number) > 1 for number in self._entries)
        self._counting = tuple(n for n, kind in enumerate(self._kinds) if kind.columns and kind.counts)
        self._remade = set[int]()
        self.cuttable = not any(self._keeps)

    def make_room(self, cache: Sequence[Any], tokens: int) -> None:
        """See the function of that name."""
        make_room(cache, tokens)

    # --- from a live cache --------------------------------------------------

    def slice(self, cache: Sequence[Any], start: int, stop: int) -> Slices:
        """Copies the rows of tokens [start, stop) of every layer. Raises Unstorable: a layer is of another class than
        at first, or holds another number of tokens."""
        return _cut(self.buffers(cache, stop), 0, start, stop)

    def checkpoint(self, cache: Sequence[Any], before: Checkpoint | None = None) -> Checkpoint:
        """Copies the state of every layer that has one. Rows of windows are shared with `before`, a checkpoint of a
        shorter prefix of the same tokens. Raises Unstorable: a layer has no state that could be copied."""
        kept = [leaf for leaf, keeps in zip(self.layers_of(cache), self._keeps, strict=True) if keeps]
        earlier, own = before.states if before is not None else (None,) * len(kept), list[Any]()
        states = tuple([_kept(leaf, old, own) for leaf, old in zip(kept, earlier, strict=True)])
        return _checkpoint(states, own)

    # --- stored pieces ------------------------------------------------------

    def part(self, rows: StoredRows, start: int, stop: int) -> Slices:
        """The rows of the tokens [start, stop) of a segment's, counted from its first, with their own buffers."""
        found = list(zip(rows.arrays, rows.forms, strict=True))
        return _cut(found, rows.start, rows.start + start, rows.start + stop)

    def parts(self, rows: Sequence[StoredRows], *, moved: bool) -> list[Slices]:
        """Each of these with buffers of its own; few arrays are copied at a time. `moved`: see `build`."""
        forms = rows[0].forms
        copies: list[list[tuple[Any, ...]]] = [[()] * len(forms) for _ in rows]
        waiting: list[Any] = []
        for index in [index for index, form in enumerate(forms) if form.columns]:
            sources = [list(one.layer(index)) for one in rows]
            for one in rows if moved else ():
                one.free_layer(index)
            made: list[list[Any]] = [[] for _ in rows]
            for column in range(len(sources[0])):
                for source, copied in zip(sources, made, strict=True):
                    copied.append(mx.contiguous(source[column]))
                    source[column] = None
                _eval_later([copied[column] for copied in made], waiting)
            for copy, copied in zip(copies, made, strict=True):
                copy[index] = tuple(copied)
        eval_and_free(waiting)
        return [_slices(c, forms, one.start, one.start + one.length) for one, c in zip(rows, copies, strict=True)]

    def check_joins(self, before: StoredRows, cache: Sequence[Any]) -> None:
        """Raises Unstorable unless rows of `cache` may follow `before`. Plain and quantised ones may follow each other:
        a row that becomes quantised takes along what it shares with rows that are plain."""
        for place, (kind, old, (_, new)) in enumerate(zip(self._kinds, before.forms, self.buffers(cache), strict=True)):
            if self._beside[place] and not kind.state:
                continue
            if old.columns and new.columns:
                joins = old[:2] == new[:2] and (old[2:] == new[2:] or 0 in (old.bits, new.bits))
            else:
                joins = old.columns == new.columns or bool(kind.state)  # a pool may have no row yet
            if not joins:
                raise Unstorable(f"a layer's rows change form from {tuple(old)} to {tuple(new)}")

    def build(
        self,
        runs: Sequence[StoredRows],
        checkpoint: Checkpoint | None,
        length: int,
        spare: int = 512,
        moved: Sequence[StoredRows] = (),
    ) -> tuple[list[Any], int]:
        """Fresh caches of `length` tokens: the runs joined (the last one cut short), and the checkpoint's state.

        Args:
            runs: consecutive, from token 0; together at least `length` tokens.
            spare: room for this many more tokens, so that the next prefill chunk does not copy all rows again.
            moved: let go of each layer once its arrays were read, so that few of them are there twice.

        Returns:
            The caches, evaluated and shared with nobody, and the bytes copied.
        """
        capacity = -(-(length + spare) // _ROUND) * _ROUND
        forms = [run.forms for run in runs]
        copied, filled, waiting, empty = 0, list[Any](), list[Any](), self.new()
        for index, (leaf, kind) in enumerate(zip(leaves(empty), self._kinds, strict=True)):
            if length and kind.columns:
                parts = [(list(run.layer(index)), form[index]) for run, form in zip(runs, forms, strict=True)]
                for one in moved:
                    one.free_layer(index)
                if kind.state or not self._beside[index] or all(form.columns for _, form in parts):
                    joined, form, size = _join(parts, kind, length, capacity, waiting)
                    leaf = _filled(joined, form, length, leaf, kind)
                    copied += size
            filled.append(leaf)
        eval_and_free(waiting)
        cache, restored = self._assembled(empty, filled, checkpoint)
        return cache, copied + restored

    def adopt(
        self, buffers: list[tuple[Any, ...]], forms: Sequence[RowForm], checkpoint: Checkpoint | None, length: int
    ) -> tuple[list[Any], int]:
        """Caches that write into these very buffers behind their first `length` tokens, and the checkpoint's state.

        Empties the list `buffers`: nobody else may hold them, or the first pass copies them. Returns what `build` does.
        """
        empty = self.new()
        each = zip(leaves(empty), forms, self._kinds, strict=True)
        filled = [_filled(buffers.pop(0), form, length, leaf, kind) for leaf, form, kind in each]
        return self._assembled(empty, filled, checkpoint)

    def _assembled(self, empty: list[Any], filled: list[Any], checkpoint: Checkpoint | None) -> tuple[list[Any], int]:
        """The caches `empty` with these layers, which get the checkpoint's state, and the bytes of that state."""
        states = iter(checkpoint.states if checkpoint is not None else ())
        own: list[Any] = []
        for leaf, kind, keeps in zip(filled, self._kinds, self._keeps, strict=True):
            if keeps and (state := next(states, None)) is not None:
                values = _rotating_state(state, own) if isinstance(state, Window) else _copy_state(state, own)
                for name, value in zip(kind.state, values, strict=True):
                    setattr(leaf, name, value)
        mx.eval(own)
        following = iter(filled)
        return [with_leaves(entry, following) for entry in empty], sum(a.nbytes for a in own)

    # --- the buffers of a row ---------------------------------------------------

    def buffers(self, cache: Sequence[Any], length: int = 0) -> list[Buffers]:
        """The arrays of each layer as they are, and their form. Raises Unstorable: one holds fewer than `length`
        tokens, or is of another class than at first."""
        found = self.layers_of(cache)
        for place in [place for place in self._counting if found[place].offset < length]:
            beside = [each for each in self._counting if self._entries[each] == self._entries[place]]
            if any(found[each].offset >= length for each in beside):
                self._remade.add(place)
            elif self._kinds[place].read(found[place])[1].columns:
                raise Unstorable(f"a layer holds {found[place].offset} tokens where {length} were said to be")
        return [self.buffer(place, leaf) for place, leaf in enumerate(found)]

    def buffer(self, place: int, layer: Any) -> Buffers:
        """The same of one layer. Raises Unstorable: it has become another class."""
        kind = self._kinds[place]
        if not kind.columns or place in self._remade:
            return (), NO_ROWS
        if kind_of(layer) is not kind:
            raise Unstorable(f"a layer became {type(layer).__name__}")
        return kind.read(layer)

    def take_buffers(self, cache: Sequence[Any], length: int) -> list[Buffers]:
        """`buffers`, evaluated, of caches that nobody writes into any more, and that are emptied.

        Raises Unstorable: they hold fewer than `length` tokens.
        """
        found = self.buffers(cache, length)
        mx.eval([arrays for arrays, _ in found])
        for leaf, kind in zip(leaves(cache), self._kinds, strict=True):
            if kind.columns:
                kind.clear(leaf)
        return found

    # --- to and from plain buffers (the disk tier) ---------------------------

    def pack(self, piece: StoredRows | Checkpoint) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
        """Copies into numpy buffers, with a JSON text that `unpack` needs."""
        buffers: dict[str, np.ndarray[Any, Any]] = {}

        def put(value: Any) -> dict[str, Any]:
            if isinstance(value, Window):
                keys, values, *_ = _rotating_state(value, [])
                return {"window": [keys, values, value.start, value.offset, value.size]}
            name = f"a{len(buffers)}"
            buffers[name] = np.array(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)
            return {"array": name, "bfloat16": value.dtype == mx.bfloat16}

        if isinstance(piece, Checkpoint):
            said: dict[str, Any] = {"states": piece.states}
        else:
            said = {"rows": piece.arrays, "forms": piece.forms, "start": piece.start, "length": piece.length}
        return buffers, json.dumps(said, default=put)

    def unpack(self, buffers: dict[str, np.ndarray[Any, Any]], meta: str) -> Slices | Checkpoint:
        """The reverse of `pack`. Raises ValueError or KeyError if `meta` does not fit the buffers."""

        def get(said: dict[str, Any]) -> Any:
            if "array" in said:
                found = mx.array(buffers[said["array"]])
                found = found.view(mx.bfloat16) if said["bfloat16"] else found
                mx.eval(found)
                return found
            if "window" in said:
                keys, values, start, offset, size = said["window"]
                piece = WindowPiece(start, offset, (keys, values), keys.nbytes + values.nbytes)
                return Window((piece,), start, offset, size)
            return said

        said = json.loads(meta, object_hook=get)
        found, layers = (said["rows"], len(self._kinds)) if "rows" in said else (said["states"], sum(self._keeps))
        if len(found) != layers:
            raise ValueError(f"{len(found)} layers, not {layers}")
        if "rows" in said:
            forms = [RowForm(tuple(columns), *rest) for columns, *rest in said["forms"]]
            return _slices([tuple(layer) for layer in found], forms, said["start"], said["start"] + said["length"])
        return _checkpoint(tuple(found), [leaf for _, leaf in tree_flatten(found) if isinstance(leaf, mx.array)])

    # --- helpers --------------------------------------------------------------

    def layers_of(self, cache: Sequence[Any]) -> list[Any]:
        """The caches of all layers. Raises Unstorable: there are more or fewer than at first."""
        found = list(leaves(cache))
        if len(found) != len(self._kinds):
            raise Unstorable(f"{len(found)} cache layers, but the model makes {len(self._kinds)}")
        return found


def _cut(found: Sequence[Buffers], base: int, start: int, stop: int) -> Slices:
    """Copies the rows of the tokens [start, stop) out of arrays that begin with those of the token `base`."""
    arrays = []
    for rows, form in found:
        wanted = form.rows(start, stop, base)
        arrays.append(tuple([mx.contiguous(a[..., wanted, :]) for a in rows]))
    return _slices(arrays, [form for _, form in found], start, stop)


def _slices(arrays: Sequence[tuple[Any, ...]], forms: Sequence[RowForm], start: int, stop: int) -> Slices:
    flat = [a for layer in arrays for a in layer]
    mx.eval(flat)
    nbytes = sum([a.nbytes for a in flat])
    few = nbytes >= _LARGE * len(flat)
    return Slices(list(arrays), tuple(forms), start, stop - start, nbytes, len(flat), packed=few)


def _join(
    runs: Sequence[tuple[list[Any], RowForm]], kind: Kind, length: int, capacity: int, waiting: list[Any]
) -> tuple[list[Any], RowForm, int]:
    """The arrays of one layer from those of its runs, their form, and the bytes copied. The runs' lists are emptied.
    `waiting`: see `_eval_later`.

    Plain runs beside quantised ones are quantised as mlx-lm would have done. Raises Unstorable: rows are missing.
    """
    form = runs[0][1]
    if any(its != form for _, its in runs):
        form = max((its for _, its in runs), key=lambda each: (len(each.columns), each.bits))
    runs = _quantised(runs, form) if form.bits else runs
    count, copied, joined = form.rows(0, length).stop, 0, list[Any]()
    for exact in kind.exact(form):
        parts = [rows.pop(0) for rows, _ in runs if rows]
        excess = sum(p.shape[-2] for p in parts) - count
        if excess < 0:
            raise Unstorable(f"{-excess} stored rows of a layer are missing")
        if excess:
            parts[-1] = parts[-1][..., : parts[-1].shape[-2] - excess, :]
        *outer, _, width = parts[0].shape
        if not exact:
            parts.append(mx.zeros((*outer, capacity - length, width), dtype=parts[0].dtype))
        joined.append(mx.concatenate(parts, axis=-2) if len(parts) > 1 else mx.contiguous(parts[0]))
        del parts
        _eval_later(joined[-1:], waiting)
        copied += joined[-1].nbytes // (joined[-1].shape[-2] or 1) * count
    return joined, form, copied


def _quantised(runs: Sequence[tuple[list[Any], RowForm]], form: RowForm) -> list[tuple[list[Any], RowForm]]:
    quantised = partial(mx.quantize, group_size=form.group_size, bits=form.bits)
    return [
        (rows if its.bits else [part for a in rows[:2] for part in quantised(a)] + rows[2:], its) for rows, its in runs
    ]


def _filled(arrays: Sequence[Any], form: RowForm, length: int, layer: Any, kind: Kind) -> Any:
    """The empty `layer`, or a quantised one in its place, with `length` tokens in these arrays."""
    if not arrays:
        return layer
    if form.bits:
        layer = layer.to_quantized(group_size=form.group_size, bits=form.bits)
    if form is not PLAIN:
        rows = form.rows(0, length)
        arrays = [a[..., rows, :] if exact else a for a, exact in zip(arrays, kind.exact(form), strict=True)]
    kind.put(layer, arrays, form.columns)
    if kind.counts:
        layer.offset = length
    return layer


def make_room(cache: Sequence[Any], tokens: int) -> None:
    """Makes sure that a pass over so many tokens finds room in each cut layer, and copies few arrays at a time for it.

    mlx-lm's own growth copies all layers in the pass. Room grows with the row, so that a long one is rarely copied.
    """
    with_kinds = [(leaf, kind_of(leaf)) for leaf in leaves(cache)]
    grow_for([(leaf, leaf.offset) for leaf, kind in with_kinds if kind.columns and kind.counts], tokens)


def grow_for(layers: Sequence[tuple[Any, int]], tokens: int) -> None:
    """Gives each of these layers room for so many tokens behind those that it holds, and for some more.

    Few arrays at a time are there twice: they are freed before the next ones are copied.
    """
    growing, total = [], 0
    for layer, held in layers:
        kind = kind_of(layer)
        arrays, form = kind.read(layer)
        if form is not PLAIN:
            arrays = tuple([a for a, exact in zip(arrays, kind.exact(form), strict=True) if not exact])
        if arrays and arrays[-1].shape[-2] < held + tokens:  # the last one grows last
            growing.append((layer, held, kind))
            total += sum(a.nbytes for a in arrays)
    waiting: list[Any] = []
    for layer, held, kind in growing:
        arrays, form = kind.read(layer)
        grown = list(arrays)
        del arrays
        kind.clear(layer)
        try:
            for place, exact in enumerate(kind.exact(form)):
                if not exact:
                    *outer, _, width = grown[place].shape
                    room = mx.zeros((*outer, room_behind(held, tokens), width), grown[place].dtype)
                    grown[place] = mx.concatenate([grown[place][..., :held, :], room], axis=-2)
                    del room
                    _eval_later(grown[place : place + 1], waiting, total // _AT_ONCE)
        finally:
            kind.put(layer, grown, form.columns)
    if waiting:
        eval_and_free(waiting)


def room_behind(held: int, tokens: int) -> int:
    """Room that a layer of `held` tokens gets for a pass over `tokens` more, and for what follows."""
    return -(-(tokens + max(_LEAST_ROOM, held // _ROOM_SHARE)) // _ROUND) * _ROUND


def eval_and_free(*arrays: Any) -> None:
    """Evaluates these, and gives back the memory of what they were made of."""
    mx.eval(*arrays)
    mx.clear_cache()


def _eval_later(arrays: Sequence[Any], waiting: list[Any], few: int = _FEW_BYTES) -> None:
    """`eval_and_free` of these and of those that are `waiting`, as soon as they are no longer `few` bytes."""
    waiting += arrays
    if sum([a.nbytes for a in waiting]) >= few:
        eval_and_free(waiting)
        waiting.clear()


def _checkpoint(states: tuple[Any, ...], own: list[Any]) -> Checkpoint:
    """Of these states, evaluated. `own`: their arrays, but those of windows."""
    made = Checkpoint(states, sum([a.nbytes for a in own]), len(own))
    mx.eval(own, [piece.arrays for piece in made.pieces()])
    return made


def _kept(leaf: Any, before: Any, own: list[Any]) -> Any:
    """A copy of a layer's state, not evaluated; of a window's rows those that `before` has are shared. `own`: see
    `_copy_state`."""
    kind = kind_of(leaf)
    if kind.windowed and not leaf.keep and leaf.keys is not None:
        return _window(leaf, before)
    try:
        return _copy_state(
            tuple([getattr(leaf, name, None) if name in kind.optional else getattr(leaf, name) for name in kind.state]),
            own,
        )
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise Unstorable(f"{type(leaf).__name__} has no readable state: {error}") from error


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


def _rotating_state(window: Window, own: list[Any]) -> tuple[Any, ...]:
    """`Kind.state` of a window with these rows, in new arrays (not evaluated), which `own` gets, too."""
    cut = [max(0, window.start - piece.start) for piece in window.pieces]
    joined = [
        mx.contiguous(
            mx.concatenate([p.arrays[i][..., c:, :] for p, c in zip(window.pieces, cut, strict=True)], axis=2)
        )
        for i in (0, 1)
    ]
    own += joined
    return *joined, window.offset, window.offset - window.start


def _copy_state(state: Any, own: list[Any]) -> Any:
    """A deep copy: new lists, and for every array a new one that pins no larger buffer (not evaluated yet). `own` gets
    these arrays, too."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, mx.array):
            own.append(mx.contiguous(leaf))
            return own[-1]
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        raise Unstorable(f"a cache's state holds a {type(leaf).__name__}")

    return tree_map(copy, state)
