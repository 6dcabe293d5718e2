"""Which models share the memory: what may be loaded, and what goes for it. Decisions only; knows no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from start_llm.core.errors import OutOfMemory
from start_llm.models.device import GIB, LEAST_CACHE_BYTES, PREFILL_BYTES


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded, or has a place because it is being loaded.

    Attributes:
        weights: bytes of its parameters.
        used: when a request last used it; a larger number is later.
        working: requests hold it now.
        pinned: it is never unloaded for another one.
    """

    key: str
    name: str
    weights: int
    used: float
    working: bool
    pinned: bool

    @property
    def may_go(self) -> bool:
        return not self.working and not self.pinned


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Attributes:
        budget: bytes that all weights, KV and what a step needs may take together; 0: nobody knows, so no limit.
        most: models that may be loaded at a time; 0: no limit.
    """

    budget: int
    most: int = 0


def least_bytes(weights: Sequence[int], running: int = 0) -> int:
    """What these models take at least: each has room for the KV of a short conversation.

    Args:
        running: bytes of KV of the requests that run now.
    """
    kv = max(len(weights) * LEAST_CACHE_BYTES, running + LEAST_CACHE_BYTES)
    return PREFILL_BYTES + sum(weights) + kv


def room_for(name: str, weights: int, residents: Sequence[Resident], limits: Limits, running: int = 0) -> list[str]:
    """Keys of the models that have to go, the one that was not used for longest first, so that another can be loaded.

    Args:
        name, weights: of the model that is to be loaded.
        running: bytes of KV of the requests that run now.

    Raises:
        OutOfMemory: not even then is there room. The message has the numbers.
    """
    if limits.budget and least_bytes([weights]) > limits.budget:
        raise OutOfMemory(
            f"{name}: its weights take {_size(weights)}, with the least that a request needs "
            f"{_size(least_bytes([weights]))}; all models together may take {_size(limits.budget)} "
            "(POOL_MEMORY_BYTES). Choose a smaller model or one with fewer bits."
        )
    stay = list(residents)
    going: list[str] = []
    for victim in sorted((each for each in residents if each.may_go), key=lambda each: each.used):
        if _fits(weights, stay, limits, running):
            break
        stay.remove(victim)
        going.append(victim.key)
    if not _fits(weights, stay, limits, running):
        raise OutOfMemory(_no_room(name, weights, stay, limits, running))
    return going


def there_will_be_room(name: str, weights: int, residents: Sequence[Resident], limits: Limits) -> bool:
    """Whether a model finds room once those at work have nothing to do: then it is worth waiting."""
    try:
        room_for(name, weights, [replace(each, working=False) for each in residents], limits)
    except OutOfMemory:
        return False
    return True


def to_free(need: int, residents: Sequence[Resident]) -> list[str] | None:
    """Keys of the models that have to go for `need` more bytes of KV; ``None``: even all that may go are too small."""
    going: list[str] = []
    for victim in sorted((each for each in residents if each.may_go), key=lambda each: each.used):
        if need <= 0:
            break
        going.append(victim.key)
        need -= victim.weights
    return None if need > 0 else going


def outlived(residents: Sequence[Resident], now: float, seconds: float) -> list[str]:
    """Keys of the models that were not used for so long; 0 seconds: none."""
    return [each.key for each in residents if seconds and each.may_go and now - each.used >= seconds]


def _fits(weights: int, stay: Sequence[Resident], limits: Limits, running: int) -> bool:
    if limits.most and len(stay) + 1 > limits.most:
        return False
    return not limits.budget or least_bytes([weights, *(each.weights for each in stay)], running) <= limits.budget


def _no_room(name: str, weights: int, stay: Sequence[Resident], limits: Limits, running: int) -> str:
    there = ", ".join(f"{each.name} ({_size(each.weights)}, {'pinned' if each.pinned else 'at work'})" for each in stay)
    if limits.most and len(stay) + 1 > limits.most:
        return f"{name} cannot be loaded: MAX_LOADED_MODELS={limits.most}, and these stay: {there or 'none'}."
    need = least_bytes([weights, *(each.weights for each in stay)], running)
    kv = f", {_size(running)} of KV of running requests" if running else ""
    return (
        f"{name} cannot be loaded beside what has to stay: together {_size(need)} of {_size(limits.budget)} "
        f"(POOL_MEMORY_BYTES) would be taken. {name} has {_size(weights)} of weights; there are {there or 'none'}{kv}."
    )


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
