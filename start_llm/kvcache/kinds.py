"""What the cache classes of mlx-lm and mlx-vlm hold. A new class is described here, in `KINDS`, and nowhere else.

A cache layer is *columns* and a small *state*:

- A column is an array that passes add rows to, and no row of it ever changes: a row for each token (keys, values, keys
  of an index), or a row for each group of `rate` tokens (a pool). A run of tokens has the rows of the groups that end
  in it. So a path is cut at any token, and the runs of a path joined are its rows.
- The state is true at one place only: recurrent state, a window's rows, the open group of a pool. Checkpoints keep it.

What a layer can make again of its columns is not stored. Uses of upstream's internals: the attributes named in `KINDS`,
which `tests/kvcache/test_kinds.py` looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from start_llm.kvcache.types import RowForm


@dataclass(frozen=True, slots=True)
class Column:
    """An array with its tokens on the axis before the last one."""

    name: str  # the attribute; a dot leads to one of a cache inside
    exact: bool = False  # the array ends with its last row; others may have room behind it
    last_axis: bool = False  # it has its tokens on the last axis


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What a cache class holds."""

    columns: tuple[Column, ...] = ()  # if it can be quantised, the first two are keys and values
    state: tuple[str, ...] = ()  # attributes; a layer without any can be cut at any token
    rate: Callable[[Any], int] = lambda layer: 1  # tokens that have one row; 0: unknown, for there is no row yet
    counts: bool = True  # its `offset` is how many tokens it holds
    windowed: bool = False  # a window of keys and values: `RotatingKVCache`
    optional: tuple[str, ...] = ()  # attributes of the state that the class may be without: they count as ``None``
    described: bool = True  # False: nobody knows the class, and its state is all that it has

    def read(self, layer: Any) -> tuple[tuple[Any, ...], RowForm]:
        """The arrays of all columns that have rows, with tokens on the axis before the last one, and how the layer
        holds its rows."""
        if self is ROWS and not isinstance(keys := layer.keys, _TRIPLE):  # most layers: quickly, here and below
            return ((keys, layer.values), PLAIN) if keys is not None else ((), NO_ROWS)
        found = [_arrays_of(layer, column) for column in self.columns]
        there = tuple([place for place, arrays in enumerate(found) if arrays])
        how = (layer.group_size, layer.bits) if there and len(found[0]) > 1 else ()
        form = RowForm(there, self.rate(layer), *how) if there else NO_ROWS
        return tuple([a for arrays in found for a in arrays]), form

    def put(self, layer: Any, arrays: Sequence[Any], there: Sequence[int] | None = None) -> None:
        """Gives a layer the arrays that `read` returns. `there`: of which columns; of all, if it is not given."""
        columns = self.columns if there is None else [self.columns[place] for place in there]
        rest, triples = iter(arrays), (len(arrays) - len(columns)) // 2
        for number, column in enumerate(columns):
            value = next(rest)
            if number < triples:
                value = value, next(rest), next(rest)
            elif column.last_axis:
                value = value.squeeze(-1)
            _set(layer, column.name, value)

    @cache  # noqa: B019 - there are few kinds and forms
    def exact(self, form: RowForm) -> list[bool]:
        """Of each array of a layer of this form: it ends with its last row."""
        return [self.columns[place].exact for place in form.columns for _ in range(3 if form.bits and place < 2 else 1)]

    def clear(self, layer: Any) -> None:
        """Lets go of all columns. Nobody computes with the layer any more."""
        for column in self.columns:
            _set(layer, column.name, None)

    def kept(self, layer: Any) -> dict[str, Any]:
        """What a pass over a layer with state changes; later passes do not change it here. For `put_back`."""
        names = [*self.state, *(column.name for column in self.columns)]
        return {name: _kept(_get(layer, name)) for name in names}

    def put_back(self, layer: Any, kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            _set(layer, name, _kept(value))


def _group_rate(layer: Any) -> int:
    """The layer does not say it: the closed groups hold all tokens but the pending ones."""
    rows = 0 if layer.compress_kv is None else layer.compress_kv.shape[1]
    pending = 0 if layer.pending_kv is None else layer.pending_kv.shape[1]
    return (layer.offset - pending) // rows if rows else 0


ROWS = Kind((Column("keys"), Column("values")))
PLAIN, NO_ROWS = RowForm((0, 1), 1), RowForm()
_TRIPLE = tuple, list
_INDEX = Column("index_keys", exact=True), Column("index_position_ids", exact=True, last_axis=True)
_INDEXED = Kind((*ROWS.columns, *_INDEX))
_UNKNOWN = Kind(state=("state",), described=False)
_ARRAYS = "ArraysCache"

KINDS: dict[str, Kind] = {
    "KVCache": ROWS,
    "QuantizedKVCache": ROWS,
    "HyV4KVCache": ROWS,
    "ConcatenateKVCache": Kind((Column("keys", exact=True), Column("values", exact=True))),
    "QSAKVCache": _INDEXED,
    "QSAQuantizedKVCache": _INDEXED,
    "MiniMaxM3KVCache": Kind((Column("kv_cache.keys"), Column("kv_cache.values"), Column("index_keys"))),
    "PoolingCache": Kind(
        (Column("pooled", exact=True),),
        ("buf_kv", "buf_gate", "remainder", "last_group"),
        rate=lambda layer: int(layer.ratio),
        counts=False,
        optional=("last_group",),  # only where `models.vision` has mended mlx-vlm
    ),
    "LayerCache": Kind(  # deepseek_v41 in mlx-lm
        (Column("compress_kv", exact=True), Column("index_k", exact=True)),
        ("window", "pending_kv", "pending_gate", "offset"),
        rate=_group_rate,
    ),
    "RotatingKVCache": Kind(state=("keys", "values", "offset", "_idx"), windowed=True),
    "ChunkedKVCache": Kind(state=("keys", "values", "offset", "start_position")),
    _ARRAYS: Kind(state=("state",), counts=False),
}
"""By the name of the class: those of mlx-vlm that are called as mlx-lm's hold the same."""


def kind_of(layer: Any) -> Kind:
    """What a layer, or a batch of layers, holds."""
    own: Kind | None = getattr(layer, "kind", None)
    if own is not None:
        return own
    if (known := KINDS.get(type(layer).__name__)) is not None:
        return known
    return KINDS[_ARRAYS] if any(base.__name__ == _ARRAYS for base in type(layer).__mro__) else _UNKNOWN


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The layers' caches, those inside of lists included."""
    for entry in cache:
        if is_list(entry):
            yield from leaves(entry.caches)
        else:
            yield entry


def is_list(entry: Any) -> bool:
    return type(entry).__name__ == "CacheList"


def with_leaves(entry: Any, following: Iterator[Any]) -> Any:
    """The entry of a cache with these layers in place of its own."""
    return (
        type(entry)(*(with_leaves(inner, following) for inner in entry.caches)) if is_list(entry) else next(following)
    )


def held_tokens(cache: Sequence[Any]) -> int:
    """Tokens in a row's KV, 0 if no layer counts them."""
    counting = (leaf.offset for leaf in leaves(cache) if kind_of(leaf).counts and hasattr(leaf, "offset"))
    return max((count for count in counting if isinstance(count, int)), default=0)


def undescribed(cache: Sequence[Any]) -> list[str]:
    """Names of the classes that nobody described."""
    return sorted({type(leaf).__name__ for leaf in leaves(cache) if not kind_of(leaf).described})


def _arrays_of(layer: Any, column: Column) -> tuple[Any, ...]:
    value = _get(layer, column.name)
    if value is None:
        return ()
    if isinstance(value, _TRIPLE):
        return tuple(value)
    return (value[..., None] if column.last_axis else value,)


def _get(layer: Any, name: str) -> Any:
    for part in name.split(".") if "." in name else (name,):
        layer = getattr(layer, part, None)
    return layer


def _set(layer: Any, name: str, value: Any) -> None:
    if "." in name:
        path, _, name = name.rpartition(".")
        layer = _get(layer, path)
    setattr(layer, name, value)


def _kept(value: Any) -> Any:
    """The same. Lists and arrays are others, for passes write into them; no bytes of an array are copied."""
    if isinstance(value, tuple | list):
        return type(value)(_kept(item) for item in value)
    return value.astype(value.dtype) if hasattr(value, "astype") else value
