"""Every agent works through the proxy that the server starts. The vendors' clients: `tests/integration/test_sdk.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from start_llm.clients import CLIENTS
from tests.e2e.scenarios import SCENARIOS
from tests.e2e.world import Target, World, make_served, skip_unless_installed
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path) -> Iterator[tuple[dict[str, Target], World]]:
    with make_served(tmp_path_factory.mktemp("served"), oracle_folder) as made:
        yield made


@pytest.mark.parametrize("name", list(CLIENTS))
def test_every_agent_through_the_proxy(name: str, served: tuple[dict[str, Target], World]) -> None:
    skip_unless_installed(name)
    world, scenario = served[1], SCENARIOS[name]
    repository = world.repository(name)
    data = world.folder / name / "cache" / "launch" / name
    texts = scenario.work(repository)
    arguments, text = scenario.first(f"Repair add. {script(*texts)}", data)
    with world.beside(name, repository, *scenario.beside) if scenario.beside else nullcontext():
        run = world.launch(name, repository, arguments, text, scenario.seconds)
    assert run.code == 0, run.output[-3000:]
    assert (repository / "out.txt").read_text() == "3\n"
    assert {entry["status"] for entry in run.served} == {200} and len(run.served) >= len(texts)
    dialect = {"claude": "messages", "codex": "responses"}.get(name, "chat")
    assert {entry["dialect"] for entry in run.served} == {dialect}
    for entry in [entry for entry in run.served if entry["tools"]][1:]:
        assert entry["reused"] > 0.9 * entry["prompt"], entry
