"""The KV store as the engine calls it: what goes wrong there costs reuse, never an answer. Model thread only."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from start_llm.core.prompt import Prompt
from start_llm.engine.decode.row import Cache
from start_llm.kvcache.blocks import Tokens, TokenSequence
from start_llm.kvcache.store import KVStore
from start_llm.kvcache.types import KVReader, Restored, RestorePlan, StoredEnd

log = logging.getLogger(__name__)

KV_FIGURES = (
    *("segments", "tokens", "leaves", "bytes", "held_bytes", "used_bytes", "budget_bytes", "arrays"),
    *("checkpoints", "checkpoint_bytes", "sessions", "evicted"),
)
STORE_ERROR = "store_error"  # the reason of a miss: the store could not be asked, or could not read what it has
NOT_RESTORABLE = "not_restorable"  # the reason of a miss: this model cannot go on from stored KV
_FAILED, _NOT_RESTORABLE = RestorePlan(0, 0, 0, STORE_ERROR), RestorePlan(0, 0, 0, NOT_RESTORABLE)
_FAULT = "fault"  # no method returns it


class GuardedStore:
    """Each method of `KVStore` with an answer for the case that the store raises: nothing found, nothing stored.

    The first error of a method is logged with its traceback, all are counted.

    Attributes:
        unguarded: the store itself, for who only looks at it.

    Args:
        fresh: makes the model's empty caches.
        reuse: stored KV can be used; else nothing is stored.
        passing: what each call is made in. With several ranks an error is not answered: it ends all of them.
    """

    def __init__(
        self,
        store: KVStore,
        fresh: Callable[[], Cache],
        *,
        reuse: bool = True,
        passing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._store, self._fresh, self._reuse, self._passing = store, fresh, reuse, passing
        self.unguarded = store
        self._errors = Counter[str]()  # by method
        self._figures: dict[str, float] = {}
        self.retreats = 0

    def _call[T, I](self, instead: I, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | I:
        """What `function` returns, or `instead` if it raises."""
        try:
            with self._passing():
                return function(*args, **kwargs)
        except Exception as error:
            method = function.__name__
            self._errors[method] += 1
            first = self._errors[method] == 1
            log.warning("the KV store failed in %s: %s: %s", method, type(error).__name__, error, exc_info=first)
            return instead

    def lookup(self, tokens: TokenSequence, limit: int) -> RestorePlan:
        return self._call(_FAILED, self._store.lookup, tokens, limit=limit) if self._reuse else _NOT_RESTORABLE

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
        self._call(None, self._store.forget, tokens, image.start)
        return self.lookup(tokens, image.start)

    def peek(self, tokens: Tokens, limit: int) -> RestorePlan:
        """`lookup` for other threads."""
        return self._call(_FAILED, self._store.peek, tokens, limit) if self._reuse else _NOT_RESTORABLE

    def restore(self, tokens: TokenSequence, plan: RestorePlan) -> Restored:
        """Caches that hold what `plan` has found; empty ones if the store fails. They are lent until `take_back`."""
        if not self._reuse:
            return Restored(self._fresh(), 0, 0)
        return self._call(None, self._store.restore, tokens, plan) or Restored(self._fresh(), 0, 0)

    def take_back(self, cache: Cache, *, valid: bool = True) -> None:
        """See `KVStore.take_back`. If it fails the KV is given up: nothing stays lent."""
        if self._call(_FAULT, self._store.take_back, cache, valid=valid) is _FAULT:
            self._call(None, self._store.take_back, cache, valid=False)

    def moved(self, cache: Cache, reader: KVReader | None) -> None:
        """Lent KV lies where `reader` reads it; ``None``: in `cache` again. It is given up if that cannot be noted."""
        if self._call(_FAULT, self._store.lent_rows.moved, cache, reader) is _FAULT:
            self.take_back(cache, valid=False)

    def stops(self, prompt: Prompt, start: int) -> tuple[int, ...]:
        return self._call((), self._store.stops, prompt, start) if self._reuse else ()

    def put(self, tokens: TokenSequence, cache: Cache, about: StoredEnd) -> None:
        if self._reuse:
            self._call(None, self._store.put, tokens, cache, about)

    # --- what stored KV takes of memory, and what it may take ---

    def has_room(self, tokens: int) -> bool:
        return self._reuse and self._call(False, self._store.has_room, tokens)

    def learn(self, tokens: int, cache: Cache) -> None:
        self._call(None, self._store.learn, tokens, cache)

    def estimate(self, tokens: int) -> int:
        return self._call(0, self._store.resident.sizes.estimate, tokens)

    def set_budget(self, budget_bytes: int | None, others: int = 0, stores: int = 1) -> None:
        self._call(None, self._store.set_budget, budget_bytes, others, stores)

    # --- when nobody asks ---

    def idle(self) -> None:
        self._call(None, self._store.idle)

    def leave(self, seconds: float) -> Iterator[None]:
        """The model goes: brings all that is stored to disk, side requests included. Each step hands on what waits for
        the disk; over when all of it is there or cannot be written, or after so many seconds."""
        until = time.monotonic() + seconds
        self._call(None, self._store.disk.write_all)
        while not self._call(True, self._store.disk.written) and time.monotonic() < until:
            yield

    def clear(self) -> None:
        self._call(None, self._store.clear)

    def figures(self) -> dict[str, float]:
        """The store's sizes, by the names that `/metrics` shows; the last ones if the store cannot be asked."""
        stats = self._call(None, self._store.stats)
        if stats is not None:
            known = (name for name in stats if name in KV_FIGURES or name.startswith("disk_"))
            self._figures = {f"kv_{name}": stats[name] for name in known}
        return self._figures | {"kv_errors": self._errors.total(), "vlm_retreat": self.retreats}

    def digest(self) -> int:
        """See `KVStore.digest`."""
        return self._call(0, self._store.digest)

    def close(self) -> None:
        self._call(None, self._store.close)
