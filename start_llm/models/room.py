"""Which models share the memory: what may be loaded, and what goes for it. Decisions only; knows no MLX."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from start_llm.core.errors import OutOfMemory
from start_llm.core.sizes import as_size
from start_llm.models.device import LEAST_CACHE_BYTES, PREFILL_BYTES


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's parameters. Several adapters of one model, and the model itself, share its arrays."""

    own: int = 0  # of those that no other model has
    group: str = ""  # which arrays it shares; empty: none
    shared: int = 0  # bytes of these, which are counted once for all who share them

    @property
    def all(self) -> int:
        return self.own + self.shared


def together(weights: Iterable[Weights]) -> int:
    """Bytes of all of them: what is shared is there once."""
    each = list(weights)
    return sum(w.own for w in each) + sum({w.group: w.shared for w in each if w.group}.values())


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded, or is going to be."""

    key: str
    name: str
    weights: Weights
    used: float = 0.0  # when a request last used it; a larger number is later
    working: bool = False  # requests hold it now
    pinned: bool = False  # it is never unloaded for another one
    ttl: float = 0.0  # seconds after its last use for which it stays; 0: for ever

    @property
    def may_go(self) -> bool:
        return not self.working and not self.pinned


@dataclass(frozen=True, slots=True)
class PoolLimits:
    budget: int  # bytes that weights, KV and what a step needs may take together; 0: nobody knows, so no limit
    most: int = 0  # models that may be loaded at a time; those that share their weights are one; 0: no limit


def least_bytes(weights: Sequence[Weights], running: int = 0) -> int:
    """What these models take at least: each has room for the KV of a short conversation.

    A model that is alone needs no more than `device.check_fit` asks for at the start: else the one that a server was
    started with could go, and never come back. `running`: bytes of KV of the requests that run now.
    """
    kv = max(len(weights) * LEAST_CACHE_BYTES, running + LEAST_CACHE_BYTES) if len(weights) > 1 else 0
    return PREFILL_BYTES + together(weights) + kv


def room_for(new: Resident, residents: Sequence[Resident], limits: PoolLimits, running: int = 0) -> list[str]:
    """Keys of the models that have to go, the one that was not used for longest first, so that `new` can be loaded.

    `running`: bytes of KV of the requests that run now. Raises OutOfMemory: not even then is there room.
    """
    least = least_bytes([new.weights])
    if limits.budget and least > limits.budget:
        takes = f"its weights take {as_size(new.weights.all)}, with the least that a request needs {as_size(least)}"
        most = f"all models together may take {as_size(limits.budget)} (POOL_MEMORY_BYTES)"
        raise OutOfMemory(f"{new.name}: {takes}; {most}. Choose a smaller model or one with fewer bits.")
    going, stay = _leave(residents, lambda stay: _fits(new, stay, limits, running))
    if not _fits(new, stay, limits, running):
        raise OutOfMemory(_no_room(new, stay, limits, running))
    return [each.key for each in going]


def _leave(
    residents: Sequence[Resident], enough: Callable[[list[Resident]], bool]
) -> tuple[list[Resident], list[Resident]]:
    """Those that have to go until `enough` is true of the others (used longest ago first), and these others."""
    going, stay = [], list(residents)
    for victim in sorted((each for each in residents if each.may_go), key=lambda each: each.used):
        if enough(stay):
            break
        stay.remove(victim)
        going.append(victim)
    return going, stay


def there_will_be_room(new: Resident, residents: Sequence[Resident], limits: PoolLimits) -> bool:
    """Whether `new` finds room once those at work have nothing to do: then it is worth waiting."""
    try:
        room_for(new, [replace(each, working=False) for each in residents], limits)
    except OutOfMemory:
        return False
    return True


def to_free(need: int, residents: Sequence[Resident]) -> list[str] | None:
    """Keys of the models that have to go for `need` more bytes of KV; ``None``: even all that may go are too small."""
    most = _bytes(residents) - need
    going, stay = _leave(residents, lambda stay: _bytes(stay) <= most)
    if _bytes(stay) > most:
        return None
    for victim in [each for each in residents if each in going]:
        if _bytes([*stay, victim]) <= most:  # others who stay have its weights, too
            stay.append(victim)
            going.remove(victim)
    return [each.key for each in going]


def outlived(residents: Sequence[Resident], now: float, seconds: float | None) -> list[str]:
    """Keys of the models that were not used for so long; ``None``: for their own time to live."""
    limits = ((each, each.ttl if seconds is None else seconds) for each in residents if each.may_go)
    return [each.key for each, limit in limits if limit and now - each.used >= limit]


def _bytes(residents: Iterable[Resident]) -> int:
    return together(each.weights for each in residents)


def _too_many(new: Resident, stay: Sequence[Resident], limits: PoolLimits) -> bool:
    models = {each.weights.group or each.key for each in (new, *stay)}
    return bool(limits.most) and len(models) > limits.most


def _fits(new: Resident, stay: Sequence[Resident], limits: PoolLimits, running: int) -> bool:
    if _too_many(new, stay, limits):
        return False
    return not limits.budget or least_bytes([each.weights for each in (new, *stay)], running) <= limits.budget


def _no_room(new: Resident, stay: Sequence[Resident], limits: PoolLimits, running: int) -> str:
    sizes = ((each.name, as_size(each.weights.all), "pinned" if each.pinned else "at work") for each in stay)
    there = ", ".join(f"{name} ({size}, {why})" for name, size, why in sizes)
    if _too_many(new, stay, limits):
        return f"{new.name} cannot be loaded: MAX_LOADED_MODELS={limits.most}, and these stay: {there or 'none'}."
    need = least_bytes([each.weights for each in (new, *stay)], running)
    kv = f", {as_size(running)} of KV of running requests" if running else ""
    return (
        f"{new.name} cannot be loaded beside what has to stay: together {as_size(need)} of {as_size(limits.budget)} "
        f"(POOL_MEMORY_BYTES) would be taken. {new.name} has {as_size(new.weights.all)} of weights; "
        f"there are {there or 'none'}{kv}."
    )


def group_of(folder: Path) -> str:
    """Links resolved: two names of one folder are one checkpoint."""
    return os.path.realpath(folder)
