"""Servers on tiny vision checkpoints, one of each family for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from start_llm.images import reader
from tests.images.corpus import MOST_BYTES, MOST_PIXELS
from tests.integration.live import Live, live
from tests.vision.checkpoint import build_vision


@pytest.fixture(scope="session")
def vision_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path(family: str) -> Path:
        if family not in made:
            made[family] = build_vision(tmp_path_factory.mktemp("vision") / family, family)
        return made[family]

    return path


@pytest.fixture(scope="session")
def seeing(
    vision_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Live]]:
    """``seeing("qwen3_vl")``: a running server, shared by the tests of the session."""
    with ExitStack() as stack:
        running: dict[str, Live] = {}

        def server(family: str) -> Live:
            if family not in running:
                cache = tmp_path_factory.mktemp("cache")
                limits = {"image_max_bytes": MOST_BYTES}
                stack.enter_context(patch.object(reader, "MOST_PIXELS", MOST_PIXELS))
                running[family] = stack.enter_context(live(vision_path(family), cache, **limits))
            return running[family]

        yield server
