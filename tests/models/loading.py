"""A model is found and loaded without a pause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings
from start_llm.models.background import Progress, Say, at_once
from start_llm.models.device import GIB, Device
from start_llm.models.loader import BasesInMemory, LoadedModel, find_model, load_steps

MACHINE = Device("Linux", "some CPU", 32 * GIB, "cpu", 24 * GIB)


def quiet(*said: Any) -> None:
    """Neither steps nor words are shown."""


def load_model(
    settings: Settings, say: Say = quiet, device: Device = MACHINE, *, bases: BasesInMemory | None = None
) -> LoadedModel:
    """Without its vision part if that cannot be loaded, as `ModelBuilder` does."""
    progress: Progress = quiet
    found, kept = find_model(settings, device, progress, say), BasesInMemory()
    try:
        return at_once(load_steps(found, progress, say, kept if bases is None else bases))
    except NotSupported:
        if not found.sees:
            raise
    return at_once(load_steps(replace(found, sees=False), progress, say, kept))
