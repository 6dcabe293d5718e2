"""One model over several processes, as one of them sees it: its part of the weights, and what all of them agree on.

The idea: every rank runs the same scheduler, so all make the same passes in the same order, and each pass adds up what
the ranks have computed. Whatever could differ between two machines (time, memory, what is known of the model) is taken
from rank 0: it goes through `agree`, in the same order everywhere. Tokens are those that rank 0 has drawn. A rank that
has left a pass in another way than by its end may make no other one: `fail` ends all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from typing import Any, NoReturn

import mlx.core as mx

from start_llm.core.errors import NotSupported
from start_llm.engine.ranks.interface import Ranks

HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Of a model's configuration: what each rank has an equal part of."""
REACH_SECONDS = 30.0  # that the machine of the next rank in the ring may take to answer
RING_SECONDS = 60.0  # that the ring may take to be made
WORDS_SECONDS = 1.0  # to write where it waits, before the process is ended
MOST_SAMPLERS = 256  # more than the samplers without a seed that `make_sampler` keeps


class RankGroup(Ranks, ABC):
    """Model thread only, but `clock` and `fail`. What the methods promise stands in `Ranks`.

    Attributes:
        addresses: of all ranks, ``address:port``, where the ring backend connects them.
        token: the same for all ranks, and for nobody else: a stranger that connects to the ring does not have it.
        least_usable: bytes that a model may take on the other machines, the least of them; rank 0 knows it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.alone = rank, size, False
        self.addresses: list[str] = []
        self.token = ""
        self.least_usable = 0
        self._thread = 0
        self._group: Any = None
        self._shared_sampler = lru_cache(MOST_SAMPLERS)(lambda sampler: _LeadersSampler(sampler, self._group))

    @abstractmethod
    def confirm(self, digest: int) -> None:
        """All ranks are here, with this digest. Rank 0 waits for the others; they do not wait."""

    @abstractmethod
    def fail(self, why: str) -> NoReturn:
        """This rank cannot go on. All ranks end, whatever they are in; nothing is computed here any more."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Sums of this rank's next pass would be added to those of the pass that the others are in.

        Other threads than the model thread compute nothing.
        """
        try:
            yield
        except Exception as error:
            if threading.get_ident() != self._thread:
                raise
            self.fail(as_sentence(error))

    def clock(self) -> float:
        """Rank 0's seconds on the model thread; on other threads, which decide nothing, this machine's."""
        now = time.monotonic()
        return float(self.agree(now)) if threading.get_ident() == self._thread else now

    def connect(self, usable: int) -> int:
        """Makes the ring. Returns bytes, the least of all ranks. The thread that calls this is the model thread."""
        self._thread = threading.get_ident()
        try:
            self._reach_neighbour()
        except OSError as error:
            self.fail(f"The ring cannot be made: {error}.")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([[address] for address in self.addresses], file)
            file.flush()
            os.environ.update(MLX_HOSTFILE=file.name, MLX_RANK=str(self.rank))
            # MLX waits without an end, and holds Python's lock: no code of Python could end this process. A signal that
            # has no handler ends it, and the supervisor starts all again. (`faulthandler` ends it with NOT_STARTED.)
            faulthandler.dump_traceback_later(RING_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, RING_SECONDS + WORDS_SECONDS)
            try:
                self._group = mx.distributed.init(strict=True, backend="ring")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                faulthandler.cancel_dump_traceback_later()
        self._check_ring()
        return int(self.agree(min(usable, self.least_usable)))

    def shard(self, model: Any, name: str, config: Mapping[str, Any]) -> None:
        """In place, before its weights are read. Raises NotSupported: it cannot be divided, or not by so many."""
        if not hasattr(model, "shard"):
            raise NotSupported(f"{name} cannot be divided: mlx-lm has no shard for model_type {config['model_type']}.")
        inner = config.get("text_config") or config
        uneven = [f"{head}={inner[head]}" for head in HEADS if (inner.get(head) or self.size) % self.size]
        if uneven:
            raise NotSupported(f"{name} cannot be divided by {self.size} hosts: {', '.join(uneven)}.")
        model.shard(self._group)

    def sampler(self, sampler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if hasattr(sampler, "inner"):  # of one row
            return _LeadersSampler(sampler, self._group)
        return self._shared_sampler(sampler)

    def _meet(self) -> None:
        """All ranks have come to here."""
        self.confirm(0)
        self.agree(0)

    def _reach_neighbour(self) -> None:
        """Connects to the next rank of the ring, at the port at which the ring will. Raises OSError in words."""
        rank = (self.rank + 1) % self.size
        (here, _, own), (there, _, port) = (self.addresses[each].rpartition(":") for each in (self.rank, rank))
        with socket.create_server((here, int(own))):  # the system takes calls; nobody need read them
            self._meet()  # all listen; rank 0 may have fetched the model first
            try:
                socket.create_connection((there, int(port)), timeout=REACH_SECONDS).close()
            except OSError as error:
                where = f"rank {rank} ({self.addresses[rank]}) cannot be reached from rank {self.rank}"
                raise OSError(f"{where}: {error}") from None
            self._meet()  # nobody calls any more
        self._meet()  # nor listens: the ring of a quicker rank would connect to this socket, and wait without an end

    def _check_ring(self) -> None:
        """Fails if a stranger was quicker than a rank: the ring takes who comes first, and asks for no key."""
        numbers = [int.from_bytes(sha256(f"{self.token} {rank}".encode()).digest()[:3]) for rank in range(self.size)]
        stranger = "The ring does not add up: somebody else has connected to one of its ports."
        late = threading.Timer(RING_SECONDS, self.fail, (stranger,))
        late.daemon = True
        late.start()
        try:
            total = mx.distributed.all_sum(mx.array([numbers[self.rank]] * self.size), group=self._group).tolist()
        except RuntimeError as error:
            self.fail(f"{stranger} ({error})")
        finally:
            late.cancel()
        if total != [sum(numbers)] * self.size:
            self.fail(stranger)


def as_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".") + "."


class _LeadersSampler:
    """`inner`: see `RowState.sampler`."""

    def __init__(self, sampler: Callable[[Any], Any], group: Any) -> None:
        self._sampler, self._group = sampler, group
        self.inner = getattr(sampler, "inner", sampler)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token ids [rows], as rank 0 draws them of `logprobs` [rows, vocab]: a sum to which the others give zeros."""
        # Not `zeros_like`: that would not need the pass, which would then come later or never, and all would hang.
        drawn = self._sampler(logprobs).astype(mx.int32) * (self._group.rank() == 0)
        return mx.distributed.all_sum(drawn, group=self._group)
