"""The KV store as the engine calls it: what goes wrong there costs reuse, never an answer. Model thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from start_llm.core.prompt import Prompt
from start_llm.core.report import StoredTree
from start_llm.engine.decode.runner import Cache
from start_llm.kvcache.blocks import Tokens, TokenSequence
from start_llm.kvcache.store import KVStore
from start_llm.kvcache.types import Restored, RestorePlan

log = logging.getLogger(__name__)

KV_FIGURES = (
    *("segments", "leaves", "bytes", "budget_bytes"),
    *("checkpoints", "checkpoint_bytes", "sessions", "evicted"),
)
STORE_ERROR = "store_error"
"""The reason of a miss: the store could not be asked."""
NOT_RESTORABLE = "not_restorable"
"""The reason of a miss: this model cannot go on from stored KV."""


class GuardedStore:
    """Each method of `KVStore` with an answer for the case that the store raises: nothing found, nothing stored.

    The first error of a method is logged with its traceback, all are counted (``kv_errors``).

    Args:
        fresh: makes the model's empty caches.
        reuse: stored KV can be used; else nothing is stored.
    """

    def __init__(self, store: KVStore, fresh: Callable[[], Cache], *, reuse: bool = True) -> None:
        self._store, self._fresh, self._reuse = store, fresh, reuse
        self._told: set[str] = set()
        self._figures: dict[str, float] = {}
        self.errors = 0
        self.retreats = 0

    def lookup(self, tokens: TokenSequence, limit: int) -> RestorePlan:
        if not self._reuse:
            return RestorePlan(0, 0, 0, NOT_RESTORABLE)
        with self._guarded("lookup"):
            return self._store.lookup(tokens, limit=limit)
        return RestorePlan(0, 0, 0, STORE_ERROR)

    def find(self, prompt: Prompt, tokens: TokenSequence, limit: int) -> RestorePlan:
        """`lookup` for `tokens` that begin with the prompt's; what is found never ends inside an image.

        Nothing is stored that ends there, so what does is wrong: it is given up and counted, and the image is computed.
        """
        plan = self.lookup(tokens, limit)
        image = prompt.image_at(plan.length)
        if image is None:
            return plan
        self.retreats += 1
        log.warning("stored KV ends inside an image (%d of %d)", plan.length - image.start, image.length)
        with self._guarded("forget"):
            self._store.forget(tokens, image.start)
        return self.lookup(tokens, image.start)

    def peek(self, tokens: Tokens, limit: int) -> RestorePlan:
        """`lookup` for other threads."""
        if not self._reuse:
            return RestorePlan(0, 0, 0, NOT_RESTORABLE)
        with self._guarded("peek"):
            return self._store.peek(tokens, limit)
        return RestorePlan(0, 0, 0, STORE_ERROR)

    def show(self) -> StoredTree:
        """The whole tree, for people; for other threads. Raises TimeoutError."""
        return self._store.snapshot()

    def restore(self, tokens: TokenSequence, plan: RestorePlan) -> Restored:
        with self._guarded("restore"):
            return self._store.restore(tokens, plan)
        return Restored(self._fresh(), 0, 0)

    def pauses(self, prompt: Prompt, start: int) -> tuple[int, ...]:
        with self._guarded("pauses"):
            return () if not self._reuse else self._store.pauses(prompt, start)
        return ()

    def put(self, tokens: TokenSequence, cache: Cache, **about: Any) -> None:
        """`about`: the keyword arguments of `KVStore.put`."""
        if not self._reuse:
            return
        with self._guarded("put"):
            self._store.put(tokens, cache, **about)

    def idle(self) -> None:
        with self._guarded("idle"):
            self._store.idle()

    def leave(self) -> None:
        """All that is stored is to be written, side requests included: the model goes, see `written`."""
        with self._guarded("leave"):
            self._store.disk.write_all()

    def written(self) -> bool:
        """Hands on what waits for the disk. True: all of it is there, or cannot be written."""
        with self._guarded("written"):
            return self._store.disk.written()
        return True

    def has_room(self, tokens: int) -> bool:
        with self._guarded("has_room"):
            return self._reuse and self._store.has_room(tokens)
        return False

    def learn(self, tokens: int, cache: Cache) -> None:
        with self._guarded("learn"):
            self._store.learn(tokens, cache)

    def estimate(self, tokens: int) -> int:
        with self._guarded("estimate"):
            return self._store.estimate(tokens)
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of KV in memory."""
        with self._guarded("nbytes"):
            return self._store.nbytes
        return 0

    def set_budget(self, budget_bytes: int) -> None:
        with self._guarded("set_budget"):
            self._store.set_budget(budget_bytes)

    def figures(self) -> dict[str, float]:
        """The store's sizes, by the names that `/metrics` shows; the last ones if the store cannot be asked."""
        with self._guarded("stats"):
            stats = self._store.stats()
            self._figures = {f"kv_{name}": getattr(stats, name) for name in KV_FIGURES}
            self._figures |= {f"kv_disk_{name}": value for name, value in stats.disk.items()}
        return self._figures | {"kv_errors": self.errors, "vlm_retreat": self.retreats}

    def close(self) -> None:
        with self._guarded("close"):
            self._store.close()

    @contextmanager
    def _guarded(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors += 1
            first = method not in self._told
            self._told.add(method)
            log.warning("the KV store failed in %s: %s: %s", method, type(error).__name__, error, exc_info=first)
