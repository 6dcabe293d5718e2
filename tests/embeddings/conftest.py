from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.extras import is_installed
from start_llm.core.settings import Settings
from start_llm.core.work import EngineStatus
from start_llm.embeddings.service import EncoderService
from start_llm.engine.assembly import ModelBuilder
from start_llm.modelpool.loader import Loader
from start_llm.modelpool.pool import Pool
from start_llm.modelpool.registry import ModelRegistry
from start_llm.modelpool.resolve import NameResolver
from start_llm.prompt.clients import Clients
from tests.embeddings.tiny import build_encoder
from tests.steps import through
from tests.together import together


class OneThread:
    """Stands for the model thread: runs each chore on a thread of its own, one at a time, and counts them."""

    def __init__(self) -> None:
        self.chores = 0

    def status(self) -> EngineStatus:
        return EngineStatus("ready")

    def watched(self) -> float:
        return 0.0

    def guest(self, steps: Generator[float, None, Any]) -> Any:
        return self.chore(steps)

    def chore(self, steps: Generator[float, None, Any]) -> Any:
        self.chores += 1
        return together([lambda: through(steps)[1]])[0]


@pytest.fixture
def needs_library() -> None:
    if not is_installed("mlx_embeddings"):
        pytest.skip("mlx-embeddings is not installed: pip install '.[embeddings]' -c constraints.txt")


@pytest.fixture(scope="session")
def encoder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_encoder(tmp_path_factory.mktemp("encoder") / "tiny-encoder")


@pytest.fixture
def thread() -> OneThread:
    return OneThread()


@pytest.fixture
def service(thread: OneThread) -> Iterator[Callable[..., EncoderService]]:
    """``service(path)``: an encoder service on that model; without one, as with EMBEDDING_MODEL unset."""
    pools: list[Pool] = []

    def made(path: Path | str | None = None) -> EncoderService:
        settings = Settings(_env_file=None, embedding_model=None if path is None else str(path))  # type: ignore[call-arg]
        registry = ModelRegistry(settings, NameResolver(settings))
        builder = ModelBuilder(settings, registry.reclaim, print, lambda step, part: None)
        builder.begin(0)
        engine: Any = thread
        pool = Pool(registry, engine, builder, Loader(registry, engine, builder, Clients(), print))
        pool._loader.start()
        pools.append(pool)
        encoders = EncoderService(settings, pool.open_encoder, thread)
        encoders.prepare(lambda step, part: None)
        return encoders

    yield made
    for pool in pools:
        pool.stop()
