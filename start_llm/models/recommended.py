"""Models for this machine, from a table with date and source; short names for them. Knows no MLX."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path

from start_llm.models.device import GIB, PREFILL_BYTES, ROW_PEAK

KV_BYTES = 2  # per number: half precision
KV_TOKENS = 32_768  # of a conversation that has to fit beside the weights
FRESH_DAYS = 90  # so long an entry is believed without a word
READ_SHARE = 0.7  # of the memory's bandwidth that decoding reaches


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A model for a coding agent."""

    short: str
    repository: str
    weights: int  # bytes in memory
    active: int  # bytes that one token reads
    least_memory: int  # bytes of the machine that it is meant for
    kv: int  # numbers that a token adds to the cache
    seen: date  # when these figures were looked at
    note: str

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV of a conversation of so many tokens, without states of fixed size."""
        return self.kv * KV_BYTES * tokens

    def needs(self, tokens: int) -> int:
        """Bytes that it takes while it answers in a conversation of so many tokens."""
        return needed_bytes(self.weights, self.kv, tokens)

    def fits(self, memory: int, usable: int) -> bool:
        """Whether it is for a machine of `memory` bytes, where weights and KV may take `usable` of them."""
        return self.least_memory <= memory and self.needs(KV_TOKENS) <= usable


def needed_bytes(weights: int, kv: int, tokens: int) -> int:
    """Bytes that a model takes while it answers in a conversation of so many tokens: the one rule of what fits.

    `kv`: numbers that a token adds to the cache.
    """
    return weights + int(kv * KV_BYTES * tokens * ROW_PEAK) + PREFILL_BYTES


_TABLE = tomllib.loads(files("start_llm.models").joinpath("recommended.toml").read_text(encoding="utf-8"))
RECOMMENDED = tuple(Recommendation(**row | {"least_memory": row["least_memory"] * GIB}) for row in _TABLE["model"])
SOURCE = f"{_TABLE['source']}, {max(model.seen for model in RECOMMENDED)}"
SHORT_NAMES = {model.short: model.repository for model in RECOMMENDED}


def recommended_model(memory: int) -> Recommendation | None:
    """The best of the table for an Apple Silicon machine with `memory` bytes; ``None`` below 8 GiB."""
    return next((model for model in RECOMMENDED if model.least_memory <= memory), None)


def recommend(memory: int, usable: int, count: int = 3) -> list[Recommendation]:
    """The best models first, for a machine of `memory` bytes; weights and KV of 32k tokens take `usable` bytes."""
    return [model for model in RECOMMENDED if model.fits(memory, usable)][:count]


def outdated(models: Iterable[Recommendation], today: date) -> str:
    """A sentence about entries that nobody has looked at for over `FRESH_DAYS` days; empty if there are none."""
    old = [model for model in models if (today - model.seen).days > FRESH_DAYS]
    if not old:
        return ""
    names = ", ".join(model.short for model in old)
    return f"Over {FRESH_DAYS} days old (newer models may be better): {names}, from {min(model.seen for model in old)}."


def published_head(model: str) -> str:
    """The repository of the head that is published for a model (its repository or folder); empty: none is known."""
    name = model.rstrip("/").rpartition("/")[2]
    known: dict[str, str] = _TABLE["heads"]
    fits = (head for base, head in known.items() if f"{name}-".startswith(f"{base}-") and "-MTP-" not in f"{name}-")
    return next(fits, "")


def bandwidth(chip: str) -> int | None:
    """GB/s of an Apple chip's memory by its name (``Apple M4 Pro``); ``None`` if the table does not know it."""
    known: dict[str, int] = _TABLE["bandwidth"]
    return known.get(chip.removeprefix("Apple ").strip())


def tokens_per_second(model: Recommendation, chip: str) -> float | None:
    """About how many tokens a second it generates: what one token reads, by the memory's bandwidth."""
    rate = bandwidth(chip)
    return None if rate is None else READ_SHARE * rate * 1e9 / model.active


def full_name(source: str | None, own: Path | None = None) -> str | None:
    """The repository of a short name, or the folder of that name in `own`; anything else as it is."""
    if source and own is not None and not Path(source).exists() and (own / source / "config.json").is_file():
        return str(own / source)
    return source if source is None else SHORT_NAMES.get(source.lower(), source)
