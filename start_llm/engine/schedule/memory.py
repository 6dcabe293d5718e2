"""Keeps KV within the machine's memory: what running requests take, the store gives up. Model thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from start_llm.core.errors import OutOfMemory
from start_llm.models.device import GIB, default_cache_bytes, kv_bytes
from start_llm.models.room import Weights, together

LEAST_STORED = 64 * 2**20


class StoredBytes(Protocol):
    """What the guard needs of the store."""

    @property
    def nbytes(self) -> int:
        """Bytes that are stored in memory now."""
        ...

    def estimate(self, tokens: int) -> int:
        """Bytes of KV of so many tokens; 0 while that is unknown."""
        ...

    def set_budget(self, budget_bytes: int) -> None:
        """Evicts down to it."""
        ...


class Shared:
    """What the KV of all loaded models may take together. Model thread only, but for `running`.

    What running requests of any model take, all stores give up. What is left for stored KV is anybody's who needs it;
    only where it is short, each model is sure of an equal part.

    Args:
        total: bytes that running and stored KV may take together; 0: no limit.
        most_stored: bytes of stored KV while nothing runs.

    Attributes:
        running: bytes of KV that running requests hold.
    """

    def __init__(self, total: int, most_stored: int) -> None:
        self._total, self._most_stored = total, most_stored
        self._guards: list[MemoryGuard] = []
        self.running = 0

    def __len__(self) -> int:
        """Models that share."""
        return len(self._guards)

    @property
    def total(self) -> int:
        return self._total

    @property
    def most_stored(self) -> int:
        return self._most_stored

    def reclaim(self, need: int) -> bool:
        """Asks for so many bytes more. False: there are not so many. What is promised comes later."""
        return False

    def total_alone(self, model: str) -> int:
        """`total`, once idle models have gone for this one."""
        return self.total

    def beside(self, guard: MemoryGuard) -> int:
        """Bytes that requests of other models hold."""
        return sum(other.held_bytes for other in self._guards if other is not guard)

    def join(self, guard: MemoryGuard) -> None:
        self._guards.append(guard)
        if len(self._guards) > 1:
            self.apply()

    def part(self, guard: MemoryGuard) -> None:
        self._guards.remove(guard)
        self.apply()

    def apply(self) -> None:
        """Gives each store its bytes. To be called whenever something has changed."""
        self.running = sum(guard.held_bytes for guard in self._guards)
        total = self.total
        if not total or not self._guards:
            return
        pot = min(self.most_stored, max(LEAST_STORED, total - self.running))
        if len(self._guards) == 1:
            self._guards[0].set_budget(pot)
            return
        sure = pot // len(self._guards)
        stored = {id(guard): guard.stored_bytes for guard in self._guards}
        for guard in self._guards:
            others = sum(stored.values()) - stored[id(guard)]
            guard.set_budget(max(sure, pot - others))
            stored[id(guard)] = guard.stored_bytes


class Pooled(Shared):
    """The same for models that come and go: their weights decide what is left for KV.

    Args:
        usable: bytes that all weights and KV may take together; 0: no limit.
        most_stored: ``None``: a share of what the weights leave.
        reclaim: see `Shared.reclaim`; by unloading idle models.
        staying: weights of models that do not go for the one of that name.

    Attributes:
        weight_bytes: what all weights take; those that models share once. Any thread.
    """

    def __init__(
        self,
        usable: int,
        most_stored: int | None,
        reclaim: Callable[[int], bool],
        staying: Callable[[str], Sequence[Weights]] = lambda model: (),
    ) -> None:
        super().__init__(0, 0)
        self._staying = staying
        self._usable, self._chosen, self._reclaim = usable, most_stored, reclaim
        self._weights: dict[str, Weights] = {}
        self.weight_bytes = 0

    @property
    def total(self) -> int:
        return kv_bytes(self._usable, self.weight_bytes) if self._usable else 0

    def total_alone(self, model: str) -> int:
        weights = together([self._weights.get(model, Weights()), *self._staying(model)])
        return kv_bytes(self._usable, weights) if self._usable else 0

    @property
    def most_stored(self) -> int:
        if self._chosen is not None:
            return self._chosen
        return default_cache_bytes(self._usable, self.weight_bytes)

    def reclaim(self, need: int) -> bool:
        return self._reclaim(need)

    def place(self, model: str, weights: Weights) -> None:
        """A model's weights take so much from now on."""
        self._weights[model] = weights
        self._counted()

    def leave(self, model: str) -> None:
        """The model's weights are gone."""
        self._weights.pop(model, None)
        self._counted()

    def _counted(self) -> None:
        self.weight_bytes = together(self._weights.values())
        self.apply()


class MemoryGuard:
    """Counts in tokens; bytes follow from what the store has measured, so that a better estimate counts at once.

    Rows that decode together are padded to the longest: each is counted with the length of that one.

    Args:
        total, most_stored: of a model that shares with nobody, see `Shared`.
        shared: what this model and others may take together.
    """

    def __init__(
        self, store: StoredBytes, *, total: int = 0, most_stored: int = 0, shared: Shared | None = None
    ) -> None:
        self._store = store
        self._shared = Shared(total, most_stored) if shared is None else shared
        self._held: dict[str, int] = {}
        self._shared.join(self)

    @property
    def held_bytes(self) -> int:
        """What this model's running requests take."""
        return self._bytes(self._held.values())

    @property
    def stored_bytes(self) -> int:
        return self._store.nbytes

    @property
    def crowded(self) -> bool:
        """Requests of other models hold memory, too."""
        return self._shared.beside(self) > 0

    @property
    def over(self) -> bool:
        """What runs takes more than there is."""
        return bool(self._shared.total) and self.held_bytes + self._shared.beside(self) > self._shared.total

    def admits(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits beside those that run; one alone always does, see `check`."""
        total, others = self._shared.total, self._shared.beside(self)
        if not total or not (self._held or others):
            return True
        return self._bytes((*self._held.values(), tokens)) + others <= total

    def check(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits if nothing else runs. False: once idle models have gone, it will.

        Raises OutOfMemory if it can never fit.
        """
        need, total = self._store.estimate(tokens), self._shared.total
        if not total or need <= total:
            return True
        if self._shared.reclaim(need - total):
            return False
        raise OutOfMemory(
            f"This request needs {need / GIB:.1f} GiB of KV for {tokens} tokens; "
            f"{total / GIB:.1f} GiB are there beside the model. Shorten the conversation, or set KV_BITS."
        )

    def most_tokens(self, model: str | None = None) -> int | None:
        """The longest row that fits alone; ``None``: there is no limit, or nobody knows.

        Args:
            model: it is this model's, and idle ones may go for it: see `check`.
        """
        state = self._store.estimate(0)
        total = self._shared.total if model is None else self._shared.total_alone(model)
        a_million = self._store.estimate(2**20) - state
        return max(0, (total - state) * 2**20 // a_million) if total and a_million > 0 else None

    def take(self, key: str, tokens: int) -> None:
        """The request holds, or is going to hold, so many tokens: the stores make room for it."""
        if self._held.get(key) != tokens:
            self._held[key] = tokens
            self._shared.apply()

    def holds(self, key: str) -> int:
        """What `take` said last; 0 for a request that does not run."""
        return self._held.get(key, 0)

    def give(self, key: str) -> None:
        """The request does not run any more. Unknown keys are ignored."""
        if self._held.pop(key, None) is not None:
            self._shared.apply()

    def set_budget(self, budget_bytes: int) -> None:
        self._store.set_budget(budget_bytes)

    def close(self) -> None:
        """The model goes: what it had is the others'."""
        self._shared.part(self)

    def _bytes(self, held: Iterable[int]) -> int:
        rows = list(held)
        return len(rows) * self._store.estimate(max(rows)) if rows else 0
