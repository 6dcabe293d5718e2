"""The world, once for all agents, and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.world import World, make_world
from tests.oracle import build_oracle

TABLE = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = []


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are shown when all tests are done."""
    return pytestconfig.stash[TABLE]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if isinstance(told := getattr(session.config, "workeroutput", None), dict):  # of pytest-xdist
        told["agents"] = session.config.stash[TABLE]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended: what it measured."""
    node.config.stash[TABLE] += getattr(node, "workeroutput", {}).get("agents", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash[TABLE]:
        terminalreporter.section("agents: computed / new tokens")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def oracle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model: plain, or what START_LLM_E2E_ORACLE says (plain, hybrid, windowed)."""
    kind = os.environ.get("START_LLM_E2E_ORACLE", "plain")
    return build_oracle(tmp_path_factory.mktemp("oracle") / kind, kind)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path) -> Iterator[World]:
    with make_world(tmp_path_factory.mktemp("world"), oracle_folder) as made:
        yield made


@pytest.fixture
def own_world(tmp_path: Path, oracle_folder: Path) -> Iterator[World]:
    """Another test's sessions are none of this one's."""
    (tmp_path / "world").mkdir()
    with make_world(tmp_path / "world", oracle_folder) as made:
        yield made
