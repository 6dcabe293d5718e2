"""Rows of a batch that are read where they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from start_llm.engine.decode import layerwise
from start_llm.engine.decode.quantised import Quantisation
from start_llm.kvcache.kinds import ROWS
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.rows import RowKV, Run

LAYERS, WIDTH = 6, 64
LENGTHS = (400, 100, 300)
RUN = 20  # tokens


def filled(length: int, first: int) -> list[Any]:
    """Layers whose values are their tokens' numbers, from `first` on."""
    layers = [KVCache() for _ in range(LAYERS)]
    tokens = mx.broadcast_to(mx.arange(first, first + length)[None, None, :, None], (1, 2, length, WIDTH))
    for number, layer in enumerate(layers):
        layer.update_and_fetch(tokens + number * 1000.0, -tokens.astype(mx.float32))
    return layers


@pytest.mark.parametrize("bits", [0, 8])
def test_a_fork_reads_a_row_of_a_batch_layer_by_layer_and_copies_what_it_takes(bits: int) -> None:
    """Each run once a layer: a conversation of many runs is not read again for each of them."""
    rows = [filled(length, 10_000 * number) for number, length in enumerate(LENGTHS)]
    quantisation = Quantisation(bits, WIDTH, 0)
    if bits:
        for row in rows:
            quantisation.apply(row)
            quantisation.batchable(row)
    rows = [list(layerwise.batchable(row)) for row in rows]
    batch = [rows[0][i].merge([row[i] for row in rows]) for i in range(LAYERS)]
    mx.eval([ROWS.read(layer)[0] for layer in batch])
    asked = Counter[int | None]()

    def read(place: int | None) -> list[Any]:
        asked[place] += 1
        return layerwise.read_row(batch, 2, place)

    row = RowKV(LayerKit(lambda: [KVCache() for _ in range(LAYERS)]), rows[2])
    row.reader = read
    runs = [Run(row, start, RUN) for start in range(0, LENGTHS[2], RUN)]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache, copied = row._kit.build(runs, None, LENGTHS[2], spare=0)
    assert asked == {None: len(runs), **dict.fromkeys(range(LAYERS), len(runs))}
    assert mx.get_peak_memory() - before <= copied * 2
    for number, layer in enumerate(cache):
        keys = mx.dequantize(*layer.keys, group_size=WIDTH, bits=bits) if bits else layer.keys
        expected = np.arange(20_000, 20_000 + LENGTHS[2]) + number * 1000.0
        np.testing.assert_allclose(np.array(keys)[0, 1, : LENGTHS[2], 5], expected)
