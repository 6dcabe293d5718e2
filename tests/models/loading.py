"""A model is found and loaded without a pause."""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings
from start_llm.models.adapter import Adapter
from start_llm.models.background import Progress, Say, at_once
from start_llm.models.device import Device
from start_llm.models.loader import BasesInMemory, LoadedModel, find_model, load_steps


def load_model(
    settings: Settings,
    device: Device,
    progress: Progress,
    say: Say,
    *,
    adapter: Adapter | None = None,
    bases: BasesInMemory | None = None,
) -> LoadedModel:
    """Without its vision part if that cannot be loaded, as `ModelBuilder` does."""
    found, kept = find_model(settings, device, progress, say, adapter=adapter), BasesInMemory()
    try:
        return at_once(load_steps(found, progress, say, kept if bases is None else bases))
    except NotSupported:
        if not found.sees:
            raise
    return at_once(load_steps(replace(found, sees=False), progress, say, kept))
