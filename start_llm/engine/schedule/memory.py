"""Keeps KV within the machine's memory: what running requests take, the store gives up. Model thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from start_llm.core.errors import OutOfMemory
from start_llm.core.sizes import as_size
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.host.pressure import Pressure
from start_llm.models.device import default_cache_bytes, kv_bytes
from start_llm.models.room import Weights, together

LEAST_STORED = 64 * 2**20
_KEPT_SHARE = {Pressure.WARNING: 0.8, Pressure.CRITICAL: 0.5}
"""Of stored KV that stays in memory each time that the system is said to be short of it."""


class SharedMemory:
    """What the KV of all loaded models may take together: what their weights leave. Model thread only, but the figures.

    Running requests come first: every store shrinks to make room for them. The stores share the rest. Where that is
    short, each model keeps at least an equal part.

    Args:
        usable: bytes that all weights and KV may take together; 0: no limit.
        most_stored: bytes of stored KV while nothing runs; ``None``: a share of what the weights leave.
        reclaim: asks for so many bytes more, by unloading idle models. False: there are not so many. True: the memory
            will be freed later; it is not free now.

    Attributes:
        guards: of the models that share.
        running: bytes of KV that running requests hold. Any thread.
        weight_bytes: what all weights take; those that models share once. Any thread.
    """

    def __init__(self, usable: int, most_stored: int | None, reclaim: Callable[[int], bool]) -> None:
        self.usable, self._most_stored, self.reclaim = usable, most_stored, reclaim
        self._weights: dict[str, Weights] = {}
        self.guards: list[MemoryGuard] = []
        self.running = self.weight_bytes = 0
        self._pressed: int | None = None  # bytes of stored KV while other programs need the memory

    @property
    def total(self) -> int:
        """Bytes that running and stored KV may take together; 0: no limit."""
        return kv_bytes(self.usable, self.weight_bytes) if self.usable else 0

    def total_alone(self, model: str, staying: Sequence[Weights]) -> int:
        """`total`, once all models but this one and those of the weights `staying` have gone."""
        return kv_bytes(self.usable, together([self._weights.get(model, Weights()), *staying])) if self.usable else 0

    @property
    def most_stored(self) -> int:
        if self._pressed is not None:
            return self._pressed
        if self._most_stored is not None:
            return self._most_stored
        return default_cache_bytes(self.usable, self.weight_bytes)

    def press(self, level: Pressure) -> None:
        """The system is short of memory, still is, or is so no more: stored KV gives way, a part each time."""
        stored = sum(guard.store.unguarded.resident.nbytes for guard in self.guards)
        least = min(stored, LEAST_STORED)
        self._pressed = None if level is Pressure.NORMAL else max(least, int(stored * _KEPT_SHARE[level]))
        self.apply()

    def place(self, model: str, weights: Weights | None) -> None:
        """A model's weights take so much from now on; ``None``: they are gone."""
        if weights is None:
            self._weights.pop(model, None)
        else:
            self._weights[model] = weights
        self.weight_bytes = together(self._weights.values())
        self.apply()

    def beside(self, guard: MemoryGuard) -> int:
        """Bytes that requests of other models hold."""
        return sum(other.held_bytes for other in self.guards if other is not guard)

    def apply(self) -> None:
        """Gives each store its bytes and its arrays: an equal part, or what the others do not hold now, if that is
        more. To be called whenever something has changed."""
        self.running = sum(guard.held_bytes for guard in self.guards)
        stores, total = [guard.store for guard in self.guards], self.total
        pot = min(self.most_stored, max(LEAST_STORED, total - self.running))
        for store in stores:
            others = [other.unguarded.resident for other in stores if other is not store]
            most = max(pot // len(stores), pot - sum(other.nbytes for other in others))
            store.set_budget(most if total else None, sum(other.arrays for other in others), len(stores))


class MemoryGuard:
    """Counts in tokens; bytes follow from what the store has measured, so that a better estimate counts at once.

    Rows that decode together are padded to the longest: each is counted with the length of that one.

    `store`: of this model. `shared`: what this model and others may take together.
    """

    def __init__(self, store: GuardedStore, shared: SharedMemory) -> None:
        self.store, self.shared = store, shared
        self._held: dict[str, int] = {}
        shared.guards.append(self)
        if len(shared.guards) > 1:
            shared.apply()

    @property
    def held_bytes(self) -> int:
        """What this model's running requests take."""
        return self._bytes(self._held.values())

    @property
    def crowded(self) -> bool:
        """Requests of other models hold memory, too."""
        return self.shared.beside(self) > 0

    @property
    def over(self) -> bool:
        """What runs takes more than there is."""
        return bool(self.shared.total) and self.held_bytes + self.shared.beside(self) > self.shared.total

    def admits(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits beside those that run; one alone always does, see `check`."""
        total, others = self.shared.total, self.shared.beside(self)
        if not total or not (self._held or others):
            return True
        return self._bytes((*self._held.values(), tokens)) + others <= total

    def check(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits if nothing else runs. False: once idle models have gone, it will.

        Raises OutOfMemory if it can never fit.
        """
        need, total = self.store.estimate(tokens), self.shared.total
        if not total or need <= total:
            return True
        if self.shared.reclaim(need - total):
            return False
        raise OutOfMemory(
            f"This request needs {as_size(need)} of KV for {tokens} tokens; "
            f"{as_size(total)} are there beside the model. Shorten the conversation, or set KV_BITS."
        )

    def most_tokens(self, model: str | None = None, staying: Sequence[Weights] = ()) -> int | None:
        """The longest row that fits alone; ``None``: there is no limit, or nobody knows.

        `model`: it is this model's, and all others may go for it but those of the weights `staying`: see `check`.
        """
        state = self.store.estimate(0)
        total = self.shared.total if model is None else self.shared.total_alone(model, staying)
        a_million = self.store.estimate(2**20) - state
        return max(0, (total - state) * 2**20 // a_million) if total and a_million > 0 else None

    def take(self, key: str, tokens: int) -> None:
        """The request holds, or is going to hold, so many tokens: the stores make room for it."""
        if self._held.get(key) != tokens:
            self._held[key] = tokens
            self.shared.apply()

    def holds(self, key: str) -> int:
        """What `take` said last; 0 for a request that does not run."""
        return self._held.get(key, 0)

    def give(self, key: str) -> None:
        """The request does not run any more. Unknown keys are ignored."""
        if self._held.pop(key, None) is not None:
            self.shared.apply()

    def close(self) -> None:
        """The model goes: what it had is the others'."""
        self.shared.guards.remove(self)
        self.shared.apply()

    def _bytes(self, held: Iterable[int]) -> int:
        rows = list(held)
        return len(rows) * self.store.estimate(max(rows)) if rows else 0
