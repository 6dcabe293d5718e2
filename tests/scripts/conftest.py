"""A server that any script can be pointed at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.servers import Server
from tests.oracle import build_oracle
from tests.scripts.fake_server import fake_server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_oracle(tmp_path_factory.mktemp("oracle"), "plain")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch, fake_server(checkpoint) as url:
        patch.setenv("ORACLE_LOG", str(folder / "log.jsonl"))
        patch.setenv("ORACLE_REPLIES", str(folder / "reply.txt"))
        yield Server("fake", url, "oracle", log=folder / "log.jsonl", replies=folder / "reply.txt")
