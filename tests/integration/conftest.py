"""Oracle checkpoints and servers on them, one of each kind for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from start_llm.engine.decode.gate import MOST_WIDE, PassCosts
from tests.integration.live import Live, Start, live
from tests.integration.pooled import link_oracles
from tests.integration.processes import Spawn, process
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


@pytest.fixture
def start(oracle_path: Callable[..., Path], tmp_path: Path) -> Start:
    """A server on an oracle, in this process; settings as keyword arguments."""

    def begin(kind: str = "plain", cache: Path = tmp_path, **settings: Any) -> Any:
        return live(oracle_path(kind), cache, **settings)

    return begin


@pytest.fixture
def spawn(oracle_path: Callable[..., Path], tmp_path: Path) -> Spawn:
    """A server on the plain oracle, as a process of its own; settings as keyword arguments."""
    return partial(process, oracle_path("plain"), tmp_path)


@pytest.fixture(scope="session")
def servers(
    oracle_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Live]]:
    """``servers("hybrid")``: a running server, shared by the tests of the session."""
    with ExitStack() as stack:
        running: dict[str, Live] = {}

        def server(kind: str) -> Live:
            if kind not in running:
                running[kind] = stack.enter_context(live(oracle_path(kind), tmp_path_factory.mktemp("cache")))
            return running[kind]

        yield server


@pytest.fixture
def cheap_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay, whatever passes took on a busy machine."""
    monkeypatch.setattr(PassCosts, "by_width", lambda *_: [0.01 + 0.0001 * width for width in range(MOST_WIDE + 1)])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three checkpoints that differ in their layers, so in their KV; by kind."""
    top = tmp_path_factory.mktemp("zoo")
    return {kind: build_oracle(top / f"oracle-{kind}", kind) for kind in ("plain", "hybrid", "windowed")}  # type: ignore[arg-type]


@pytest.fixture
def serve(folders: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """A server on the plain oracle, with the others in its models folder. Settings as keyword arguments."""

    def begin(cache: Path = tmp_path, **settings: Any) -> Any:
        link_oracles(folders, cache)
        return live(folders["plain"], cache, **({"kv_disk_dir": "auto"} | settings))

    return begin
