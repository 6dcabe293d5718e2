"""The buffers of one row as a place where segments have their KV. Model thread only. Does not know what a request is.

A request that continues a stored path takes over the path's buffers and writes behind them. Meanwhile they are *lent*:
the segments stay in the tree as *runs* of the row, and can be read between two passes, because nothing that is behind
a row's last rewind ever changes. When the request has ended the buffers are *at rest*: they belong to the tree, and
the next request takes them over as they are. A row always begins at the first token of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from start_llm.kvcache.layers import Buffers, LayerKit
from start_llm.kvcache.types import KVReader, RowForm, StoredRows, Unstorable


class RowKV:
    """
    Attributes:
        lent_to: the caches of the request that writes here; ``None``: the row is at rest.
        reader: gives the layers that the KV lies in while the request decodes in a batch; ``None``: it lies in the
            caches themselves.
        runs: how many segments have their KV here.
        tokens: of all these.
        token_bytes: of the KV of one token.
        count: of its arrays, when it came to rest.
        counted, counted_arrays: the bytes and arrays of this row that the owner of the tree has counted.
    """

    def __init__(self, kit: LayerKit, cache: Sequence[Any]) -> None:
        self._kit = kit
        self._layers: list[tuple[Any, ...]] = []
        self._forms: tuple[RowForm, ...] = ()
        self.lent_to: Sequence[Any] | None = cache
        self.reader: KVReader | None = None
        self.runs = self.tokens = self.count = 0
        self.counted = self.counted_arrays = 0
        self.token_bytes = 0.0

    @property
    def forms(self) -> tuple[RowForm, ...]:
        return self._forms if self.lent_to is None else tuple(form for _, form in self._held())

    @property
    def nbytes(self) -> int:
        """Of its buffers, room that no token fills yet included. While it is lent: what the request's caches take."""
        layers = self._layers if self.lent_to is None else [layer for layer, _ in self._held()]
        return sum([a.nbytes for layer in layers for a in layer])

    def layer(self, index: int) -> tuple[tuple[Any, ...], RowForm]:
        """The buffers of one layer, from token 0 on, and their form; they may be longer than the row."""
        if self.lent_to is None:
            return self._layers[index], self._forms[index]
        here = self.reader(index)[0] if self.reader is not None else self._kit.layers_of(self.lent_to)[index]
        return self._kit.buffer(index, here)

    def measure(self, held: Sequence[Buffers] | None = None) -> tuple[RowForm, ...]:
        """Sets `token_bytes` anew: the row may have become quantised. Returns `forms`. `held`: its buffers."""
        held, total = held or self._held(), 0.0
        for layer, form in held:
            rate = form.rate or 1
            for a in layer:
                total += a.nbytes / (a.shape[-2] or 1) / rate
        self.token_bytes = total
        return tuple([form for _, form in held])

    def lend(self) -> tuple[list[tuple[Any, ...]], tuple[RowForm, ...]]:
        """Gives its buffers away; the caller builds caches of them and sets `lent_to`."""
        layers, self._layers = self._layers, []
        return layers, self._forms

    def rest(self, length: int) -> None:
        """The request has ended. Takes its buffers, `length` tokens at least, and leaves its caches empty. Raises
        Unstorable: they hold fewer, or their KV has gone with a batch."""
        assert self.lent_to is not None
        if self.reader is not None:
            raise Unstorable("the row has not come out of its batch")
        held = self._kit.take_buffers(self.lent_to, length)
        self._layers, self._forms = [layer for layer, _ in held], self.measure(held)
        self.lent_to, self.count = None, sum(map(len, self._layers))

    def free_layer(self, index: int) -> None:
        self._layers[index] = ()

    def clear(self) -> None:
        """Lets go of all buffers: no segment is in this row any more."""
        self._layers, self.lent_to, self.reader = [], None, None

    def _held(self) -> list[Buffers]:
        """The buffers of every layer, and their form."""
        if self.lent_to is None:
            return list(zip(self._layers, self._forms, strict=True)) if self._layers else []
        return self._kit.buffers(self.lent_to if self.reader is None else self.reader(None))


@dataclass(frozen=True, slots=True)
class Run:
    """The KV of tokens [start, start + length), which lies in a row. Read like `Slices`."""

    row: RowKV
    start: int
    length: int

    @property
    def forms(self) -> tuple[RowForm, ...]:
        return self.row.forms

    @property
    def nbytes(self) -> int:
        return int(self.length * self.row.token_bytes)

    def layer(self, index: int) -> tuple[Any, ...]:
        """Views, which pin the row's buffers: to be copied at once."""
        buffers, form = self.row.layer(index)
        rows = form.rows(self.start, self.start + self.length)
        return tuple([a[..., rows, :] for a in buffers])

    def free_layer(self, index: int) -> None:
        self.row.free_layer(index)

    @property
    def arrays(self) -> list[tuple[Any, ...]]:
        return [self.layer(index) for index in range(len(self.forms))]


def is_lent(rows: StoredRows | None) -> bool:
    """They lie in a running request's row: giving them up would free nothing."""
    return isinstance(rows, Run) and rows.row.lent_to is not None
