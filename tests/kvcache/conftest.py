from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.kvcache.disk.tier import DiskTier
from tests.memory_folder import memory_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tier that a test opens is closed at its end."""
    opened: list[DiskTier] = []
    begin = DiskTier.__init__

    def begun(tier: DiskTier, *given: Any, **more: Any) -> None:
        begin(tier, *given, **more)
        opened.append(tier)

    monkeypatch.setattr(DiskTier, "__init__", begun)
    yield
    for tier in opened:
        tier.close()
