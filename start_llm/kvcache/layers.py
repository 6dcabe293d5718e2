"""How the KV of a model's cache layers is cut, copied and rebuilt.

The only file of this room that computes with MLX. What each class of layers holds stands in `kinds`: columns, of which
any run of tokens can be stored and joined again, and a small state, of which checkpoints hold copies. A layer whose
`transient` is true is not stored: it is empty after a restore. `CacheList` is looked through. Uses of upstream's
internals: `RotatingKVCache._idx` and `_temporal_order`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from start_llm.kvcache.kinds import Kind, kind_of, leaves, with_leaves
from start_llm.kvcache.types import Checkpoint, RowForm, Slices, StoredRows, Unstorable, Window, WindowPiece

_ROUND = 64  # the capacity of a restored cache is a multiple of this many tokens
_ROOM_SHARE = 32  # a row that grows gets room for this part of its length
_LEAST_ROOM = 128  # and for at least so many tokens
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
        kept = [leaf for leaf, keeps in zip(self._leaves(cache), self._keeps, strict=True) if keeps]
        earlier = before.states if before is not None else (None,) * len(kept)
        return _checkpoint([_kept(leaf, old) for leaf, old in zip(kept, earlier, strict=True)])

    # --- stored pieces ------------------------------------------------------

    def part(self, rows: StoredRows, start: int, stop: int) -> Slices:
        """The rows of the tokens [start, stop) of a segment's, counted from its first, with their own buffers."""
        found = list(zip(rows.arrays, rows.forms, strict=True))
        return _cut(found, rows.start, rows.start + start, rows.start + stop)

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
        free: Callable[[int], None] | None = None,
    ) -> tuple[list[Any], int]:
        """Fresh caches of `length` tokens: the runs joined (the last one cut short), and the checkpoint's state.

        Args:
            runs: consecutive, from token 0; together at least `length` tokens.
            spare: room for this many more tokens, so that the next prefill chunk does not copy all rows again.
            free: is called with the number of each layer once its arrays were read. If their owner lets go of them
                there, each of them is freed before the next one is copied.

        Returns:
            The caches, evaluated and shared with nobody, and the bytes copied.
        """
        capacity = -(-(length + spare) // _ROUND) * _ROUND
        forms = [run.forms for run in runs]
        copied, filled, empty = 0, list[Any](), self.new()
        for index, (leaf, kind) in enumerate(zip(leaves(empty), self._kinds, strict=True)):
            if length:
                parts = [(list(run.layer(index)), form[index]) for run, form in zip(runs, forms, strict=True)]
                if free is not None:
                    free(index)
                if kind.state or not self._beside[index] or all(form.columns for _, form in parts):
                    joined, form, size = _join(parts, kind, length, capacity)
                    leaf = _filled(joined, form, length, leaf)
                    copied += size
            filled.append(leaf)
        cache, restored = self._assembled(empty, filled, checkpoint)
        return cache, copied + restored

    def adopt(
        self, buffers: list[tuple[Any, ...]], forms: Sequence[RowForm], checkpoint: Checkpoint | None, length: int
    ) -> tuple[list[Any], int]:
        """Caches that write into these very buffers behind their first `length` tokens, and the checkpoint's state.

        Empties the list `buffers`: nobody else may hold them, or the first pass copies them. Returns what `build` does.
        """
        empty = self.new()
        filled = [_filled(buffers.pop(0), form, length, leaf) for leaf, form in zip(leaves(empty), forms, strict=True)]
        return self._assembled(empty, filled, checkpoint)

    def _assembled(self, empty: list[Any], filled: list[Any], checkpoint: Checkpoint | None) -> tuple[list[Any], int]:
        """The caches `empty` with these layers, which get the checkpoint's state, and the bytes of that state."""
        states = iter(checkpoint.states if checkpoint is not None else ())
        copied = 0
        for leaf, kind, keeps in zip(filled, self._kinds, self._keeps, strict=True):
            if keeps and (state := next(states, None)) is not None:
                values = _rotating_state(state) if isinstance(state, Window) else _copy_state(state)
                mx.eval(_arrays(values))
                for name, value in zip(kind.state, values, strict=True):
                    setattr(leaf, name, value)
                copied += sum(a.nbytes for a in _arrays(values))
        following = iter(filled)
        return [with_leaves(entry, following) for entry in empty], copied

    # --- the buffers of a row ---------------------------------------------------

    def buffers(self, cache: Sequence[Any], length: int = 0) -> list[Buffers]:
        """The arrays of each layer as they are, and their form. Raises Unstorable: one holds fewer than `length`
        tokens, or is of another class than at first."""
        found = self._leaves(cache)
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
            return (), RowForm()
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
            kind.clear(leaf)
            if kind.columns and kind.counts:
                leaf.offset = 0
        return found

    # --- to and from plain buffers (the disk tier) ---------------------------

    def pack(self, piece: StoredRows | Checkpoint) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
        """Copies into numpy buffers, with a JSON text that `unpack` needs."""
        buffers: dict[str, np.ndarray[Any, Any]] = {}

        def put(value: Any) -> dict[str, Any]:
            if isinstance(value, Window):
                keys, values, *_ = _rotating_state(value)
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
        return _checkpoint(found)

    # --- helpers --------------------------------------------------------------

    def _leaves(self, cache: Sequence[Any]) -> list[Any]:
        found = list(leaves(cache))
        if len(found) != len(self._kinds):
            raise Unstorable(f"{len(found)} cache layers, but the model makes {len(self._kinds)}")
        return found


def _cut(found: Sequence[Buffers], base: int, start: int, stop: int) -> Slices:
    """Copies the rows of the tokens [start, stop) out of arrays that begin with those of the token `base`."""
    arrays = []
    for rows, form in found:
        before, wanted = form.rows(0, base).stop, form.rows(start, stop)
        arrays.append(tuple(mx.contiguous(a[..., wanted.start - before : wanted.stop - before, :]) for a in rows))
    return _slices(arrays, [form for _, form in found], start, stop)


def _slices(arrays: Sequence[tuple[Any, ...]], forms: Sequence[RowForm], start: int, stop: int) -> Slices:
    flat = [a for layer in arrays for a in layer]
    mx.eval(flat)
    return Slices(list(arrays), tuple(forms), start, stop - start, sum(a.nbytes for a in flat))


def _join(
    runs: Sequence[tuple[list[Any], RowForm]], kind: Kind, length: int, capacity: int
) -> tuple[list[Any], RowForm, int]:
    """The arrays of one layer from those of its runs, evaluated one by one, their form, and the bytes copied. The runs'
    lists are emptied.

    Plain runs beside quantised ones are quantised as mlx-lm would have done. Raises Unstorable: rows are missing.
    """
    form = max((form for _, form in runs), key=lambda each: (len(each.columns), each.bits))
    if form.bits:
        quantised = partial(mx.quantize, group_size=form.group_size, bits=form.bits)
        runs = [
            (rows if its.bits else [part for a in rows[:2] for part in quantised(a)] + rows[2:], its)
            for rows, its in runs
        ]
    count, copied, joined = form.rows(0, length).stop, 0, list[Any]()
    for exact in kind.exact(form):
        parts = [rows.pop(0) for rows, its in runs if its.columns]
        excess = sum(p.shape[-2] for p in parts) - count
        if excess < 0:
            raise Unstorable(f"{-excess} stored rows of a layer are missing")
        if excess:
            parts[-1] = parts[-1][..., : parts[-1].shape[-2] - excess, :]
        *outer, _, width = parts[0].shape
        copied += sum(p.nbytes for p in parts)
        if not exact:
            parts.append(mx.zeros((*outer, capacity - length, width), dtype=parts[0].dtype))
        joined.append(mx.concatenate(parts, axis=-2))
        del parts
        eval_and_free(joined[-1])
    return joined, form, copied


def _filled(arrays: Sequence[Any], form: RowForm, length: int, layer: Any) -> Any:
    """The empty `layer`, or a quantised one in its place, with `length` tokens in these arrays."""
    if not arrays:
        return layer
    kind, count = kind_of(layer), form.rows(0, length).stop
    if form.bits:
        layer = layer.to_quantized(group_size=form.group_size, bits=form.bits)
    cut = [a[..., :count, :] if exact else a for a, exact in zip(arrays, kind.exact(form), strict=True)]
    kind.put(layer, cut, form.columns)
    if kind.counts:
        layer.offset = length
    return layer


def make_room(cache: Sequence[Any], tokens: int) -> None:
    """Makes sure that a pass over so many tokens finds room in each cut layer, and copies few arrays at a time for it.

    mlx-lm's own growth copies all layers in the pass. Room grows with the row, so that a long one is rarely copied.
    """
    counting = [leaf for leaf in leaves(cache) if kind_of(leaf).columns and kind_of(leaf).counts]
    grow_for([(leaf, leaf.offset) for leaf in counting], tokens)


def grow_for(layers: Sequence[tuple[Any, int]], tokens: int) -> None:
    """Gives each of these layers room for so many tokens behind those that it holds, and for some more.

    Few arrays at a time are there twice: they are freed before the next ones are copied.
    """
    growing, most = [], 0
    for layer, held in layers:
        kind = kind_of(layer)
        there = [place for place in kind.read(layer)[1].columns if not kind.columns[place].exact]
        arrays = kind.arrays(layer, there)
        if arrays and arrays[-1].shape[-2] < held + tokens:  # the last one grows last
            growing.append((layer, held, kind, there))
            most += sum(a.nbytes for a in arrays)
    copies, nbytes = list[Any](), 0
    for layer, held, kind, there in growing:
        grown = list(kind.arrays(layer, there))
        kind.clear(layer, there)
        try:
            for place, a in enumerate(grown):
                *outer, _, width = a.shape
                room = mx.zeros((*outer, room_behind(held, tokens), width), a.dtype)
                grown[place] = mx.concatenate([a[..., :held, :], room], axis=-2)
                copies.append(grown[place])
                nbytes += a.nbytes
                del a, room
                if nbytes >= most // _AT_ONCE:
                    eval_and_free(copies)
                    copies, nbytes = [], 0
        finally:
            kind.put(layer, grown, there)
    if copies:
        eval_and_free(copies)


def room_behind(held: int, tokens: int) -> int:
    """Room that a layer of `held` tokens gets for a pass over `tokens` more, and for what follows."""
    return -(-(tokens + max(_LEAST_ROOM, held // _ROOM_SHARE)) // _ROUND) * _ROUND


def eval_and_free(*arrays: Any) -> None:
    """Evaluates these, and gives back the memory of what they were made of."""
    mx.eval(*arrays)
    mx.clear_cache()


def _checkpoint(states: Sequence[Any]) -> Checkpoint:
    """Evaluates them. Arrays of one type become parts of one: each array is a buffer of the device, and of small states
    there are so many that the device's number of buffers is reached long before its memory is full."""
    parts: dict[int, Any] = {}
    own = _arrays(states)
    types = {a.dtype: [one for one in own if one.dtype == a.dtype] for a in own}
    for alike in types.values():
        ends = list(accumulate(a.size for a in alike))
        cut = mx.split(mx.concatenate([a.reshape(-1) for a in alike]), ends[:-1])
        parts |= {id(a): part.reshape(a.shape) for a, part in zip(alike, cut, strict=True)}
    packed = tree_map(lambda leaf: parts.get(id(leaf), leaf), list(states))
    made = Checkpoint(tuple(packed), sum(a.nbytes for a in own), len(types))
    mx.eval(list(parts.values()), [piece.arrays for piece in made.pieces()])
    return made


def _kept(leaf: Any, before: Any) -> Any:
    """A copy of a layer's state, not evaluated; of a window's rows those that `before` has are shared."""
    kind = kind_of(leaf)
    if kind.windowed and not leaf.keep and leaf.keys is not None:
        return _window(leaf, before)
    try:
        return _copy_state(
            tuple(getattr(leaf, name, None) if name in kind.optional else getattr(leaf, name) for name in kind.state)
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


def _rotating_state(window: Window) -> tuple[Any, ...]:
    """`Kind.state` of a window with these rows, in new arrays (not evaluated)."""
    cut = [max(0, window.start - piece.start) for piece in window.pieces]
    joined = [
        mx.contiguous(
            mx.concatenate([p.arrays[i][..., c:, :] for p, c in zip(window.pieces, cut, strict=True)], axis=2)
        )
        for i in (0, 1)
    ]
    return *joined, window.offset, window.offset - window.start


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
