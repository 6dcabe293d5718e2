"""Makes the `ModelCard` of each model of the pool, loaded or not: what clients and the command line see. Any thread."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import asdict, replace
from typing import Any

from start_llm.chat.handle import ModelHandle
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.modelpool.registry import ModelRegistry, PoolEntry
from start_llm.modelpool.resolve import KnownModel
from start_llm.models.catalog import is_embedded
from start_llm.models.loader import LoadedModel


def card_of(settings: Settings, handle: ModelHandle, loaded: LoadedModel, base: str) -> ModelCard:
    """What clients are told of it. `base`: of a model with an adapter: what it is called without; else empty."""
    traits = handle.pipeline.traits
    probe = loaded.capabilities.probe
    outcome = "open" if probe is None else probe.trial.outcome
    # Its template has room for calls, and it makes none. The embedded model's is ours: it has to be seen calling.
    silent = outcome != "called" if is_embedded(loaded.source) else outcome == "silent"
    by_template = bool(traits.reasoning_key or traits.reasoning_inline or traits.switches)
    facts = {name: fact for name, fact in loaded.capabilities.facts.items() if not name.startswith("template.")}
    details: dict[str, Any] = {"source": loaded.source, "facts": {name: asdict(fact) for name, fact in facts.items()}}
    if loaded.adapter is not None:
        details |= {"adapter": loaded.adapter.name} | ({"base": base} if base else {})
    return ModelCard(
        handle.name,
        int(time.time()),
        loaded.context,
        tools=traits.tools and not silent,
        reasoning=bool(handle.think_tokens) or (by_template and not silent),
        vision=handle.eyes is not None,
        images="shown" if handle.eyes is not None else settings.images_on_text_model,
        weight_bytes=loaded.weights.own if base else loaded.weight_bytes,
        context_scale=settings.context_scale_for(loaded.context),
        details=details,
    )


def all_cards(registry: ModelRegistry) -> tuple[ModelCard, ...]:
    """Of the models that there are, once the main one is loaded; the main model's first."""
    listed = registry.names.all()
    registry.forget(listed)
    entries = [entry for entry in registry.entries() if not entry.known.is_reserved]
    keys = {entry.key for entry in entries}
    cards = [card_now(registry, entry) for entry in entries]
    return (*cards, *(_stored(registry, known) for known in listed if known.key not in keys))


def card_now(registry: ModelRegistry, entry: PoolEntry) -> ModelCard:
    """As it is now. Nothing is locked while the disk is looked at: it may hang."""
    with registry.lock:
        now = copy(entry)
    card = now.card or _stored(registry, now.known)
    failed = now.failure is not None and now.state == "stored"
    return replace(
        card,
        state="failed" if failed else now.state,
        pinned=now.pinned,
        weight_bytes=card.weight_bytes if now.known.task is None else now.weights.all,
        kv_bytes=now.runtime.store.unguarded.resident.nbytes if now.runtime is not None else 0,
        problem=now.failure.message if failed and now.failure is not None else "",
    )


def _stored(registry: ModelRegistry, known: KnownModel) -> ModelCard:
    stored, adapter = known.stored, known.adapter
    context = registry.settings.context_within(stored.context)
    details: dict[str, Any] = {"source": known.source}
    if known.task is not None:
        context = 0
        details |= {"kind": "audio", "task": known.task}
    if adapter is not None:
        details |= {"base": known.base, "adapter": adapter.name}
    sees = "images" in stored.can and adapter is None
    return ModelCard(
        known.name,
        int(stored.folder.stat().st_mtime) if stored.folder.exists() else 0,
        context,
        tools="tools" in stored.can,
        reasoning="reasoning" in stored.can,
        vision=sees and registry.settings.vision == "auto",
        images="reject" if known.task else "shown" if sees else registry.settings.images_on_text_model,
        state="stored",
        pinned=registry.names.is_pinned(known),
        weight_bytes=adapter.size if adapter is not None else stored.weight_bytes or stored.size,
        context_scale=registry.settings.context_scale_for(context),
        details=details,
    )
