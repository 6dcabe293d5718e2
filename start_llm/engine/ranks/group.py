"""One model over several processes, as one of them sees it: its part of the weights, and what all of them agree on.

The idea: every rank runs the same scheduler, so all make the same passes in the same order, and each pass adds up what
the ranks have computed. Whatever could differ between two machines (time, memory, what is known of the model) is taken
from rank 0: it goes through `agree`, in the same order everywhere. Tokens are those that rank 0 has drawn.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from start_llm.core.errors import NotSupported

HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Of a model's configuration: what each rank has an equal part of."""


class RankGroup:
    """Model thread only, but `clock`.

    Attributes:
        rank, size: which one this is, of how many.
        addresses: of all ranks, ``address:port``, where the ring backend connects them.
        least_usable: bytes that a model may take on the other machines, the least of them; rank 0 knows it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.addresses: list[str] = []
        self.least_usable = 0
        self._thread = 0
        self._group: Any = None
        self._samplers: dict[Any, Callable[[Any], Any]] = {}

    def agree(self, value: Any) -> Any:
        """What rank 0 gave here (numbers, text, lists). To be called by all ranks in the same order."""
        raise NotImplementedError

    def clock(self) -> float:
        """Rank 0's seconds on the model thread; on other threads, which decide nothing, this machine's."""
        now = time.monotonic()
        return float(self.agree(now)) if threading.get_ident() == self._thread else now

    def loaded(self) -> None:
        """The model is loaded: from now on silence counts."""
        raise NotImplementedError

    def connect(self) -> None:
        """Waits for all ranks. The thread that calls this is the model thread."""
        self._thread = threading.get_ident()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([[address] for address in self.addresses], file)
            file.flush()
            os.environ.update(MLX_HOSTFILE=file.name, MLX_RANK=str(self.rank))
            self._group = mx.distributed.init(strict=True, backend="ring")

    def shard(self, model: Any, name: str, config: Mapping[str, Any]) -> None:
        """Leaves of a model, none of whose weights are read yet, the part of this rank. Raises NotSupported."""
        if not hasattr(model, "shard"):
            raise NotSupported(f"{name} cannot be divided: mlx-lm has no shard for model_type {config['model_type']}.")
        inner = config.get("text_config") or config
        uneven = [f"{head}={inner[head]}" for head in HEADS if (inner.get(head) or self.size) % self.size]
        if uneven:
            raise NotSupported(f"{name} cannot be divided by {self.size} hosts: {', '.join(uneven)}.")
        model.shard(self._group)

    def sampler(self, sampler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Draws what rank 0 draws. The same object for the same sampler, so that rows are drawn in one call."""
        if not hasattr(sampler, "inner"):  # one that rows share
            return self._samplers.setdefault(sampler, _LeadersSampler(sampler, self._group))
        return _LeadersSampler(sampler, self._group)


class _LeadersSampler:
    """`inner`: see `RowState.sampler`."""

    def __init__(self, sampler: Callable[[Any], Any], group: Any) -> None:
        self._sampler, self._group = sampler, group
        self.inner = getattr(sampler, "inner", sampler)

    def __call__(self, logprobs: mx.array) -> mx.array:
        # Not `zeros_like`: that would not need the pass, which would then come later or never, and all would hang.
        drawn = self._sampler(logprobs).astype(mx.int32) * (self._group.rank() == 0)
        return mx.distributed.all_sum(drawn, group=self._group)
