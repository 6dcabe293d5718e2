"""Oracle checkpoints and servers on them, one of each kind for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.live import Live, live
from tests.memory_folder import memory_folder
from tests.oracle import build_oracle


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def oracle_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, str], Path] = {}

    def path(kind: str, template: str = "") -> Path:
        if (kind, template) not in made:
            folder = tmp_path_factory.mktemp("oracle") / f"{kind}{template}"
            options = {"template": template} if template else {}
            made[kind, template] = build_oracle(folder, kind, **options)  # type: ignore[arg-type]
        return made[kind, template]

    return path


@pytest.fixture(scope="session")
def servers(
    oracle_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Live]]:
    """``servers("hybrid")``: a running server, shared by the tests of the session."""
    with ExitStack() as stack:
        running: dict[tuple[str, str], Live] = {}

        def server(kind: str, template: str = "") -> Live:
            if (kind, template) not in running:
                cache = tmp_path_factory.mktemp("cache")
                running[kind, template] = stack.enter_context(live(oracle_path(kind, template), cache))
            return running[kind, template]

        yield server
