"""The supervisor with an engine that ends as it is told; both are real processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from start_llm.core.settings import load_settings
from start_llm.service.place import Place, ServerState
from start_llm.service.supervisor import how
from tests.waiting import until

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60.0
QUICK = [0.02] * 5


def place_of(folder: Path) -> Place:
    return Place(load_settings(None, start_llm_cache_dir=folder, log_root=folder, mlx_port=1))


@contextmanager
def supervised(
    folder: Path, *script: str, pauses: list[float] = QUICK, **more: float
) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "script").write_text("\n".join(script))
    command = [sys.executable, "-m", "tests.service.fake", str(folder), json.dumps([pauses, more])]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(), process]:
                each.kill()
        process.wait(WAIT)


def starts(folder: Path) -> list[tuple[int, float]]:
    """(process id, time) of each start of the engine."""
    try:
        lines = (folder / "starts").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(pid), float(at)) for pid, at in map(str.split, lines)]


def state(folder: Path) -> ServerState:
    found = place_of(folder).read()
    assert found is not None
    return found


def reach(folder: Path, phase: str, restarts: int = 0) -> ServerState:
    def there() -> bool:
        found = place_of(folder).read()
        return found is not None and found.phase == phase and found.restarts >= restarts

    until(there)
    return state(folder)


@pytest.mark.smoke
def test_an_engine_that_dies_is_started_again_and_why_is_kept(tmp_path: Path) -> None:
    with supervised(tmp_path, "ready 70", "ready") as process:
        told = reach(tmp_path, "ready", restarts=1)
        assert told.model == "fake" and told.restarts == 1 and told.flags == {"mlx_port": "1"}
        assert told.last_exit is not None and told.last_exit.code == 70 and "engine: ready 70" in told.last_exit.words
        assert "the model thread died (exit code 70); another start in 0.02 s" in place_of(tmp_path).log.read_text()
        process.terminate()
        assert process.wait(WAIT) == 0


def test_it_gives_up_after_five_restarts_with_growing_pauses(tmp_path: Path) -> None:
    pauses = [0.05, 0.1, 0.2, 0.4, 0.8]
    with supervised(tmp_path, *["ready 70"] * 9, pauses=pauses) as process:
        assert process.wait(WAIT) == 70
    told = state(tmp_path)
    assert told.phase == "gave up" and told.restarts == 5
    began = [at for _, at in starts(tmp_path)]
    between = [after - before for before, after in itertools.pairwise(began)]
    assert len(began) == 6 and all(gap >= pause for gap, pause in zip(between, pauses, strict=True))
    assert not place_of(tmp_path).is_running


@pytest.mark.parametrize("code", [1, 2])
def test_what_cannot_get_better_is_not_tried_again(tmp_path: Path, code: int) -> None:
    with supervised(tmp_path, f"exit {code}") as process:
        assert process.wait(WAIT) == code
    told = state(tmp_path)
    assert told.phase == "gave up" and len(starts(tmp_path)) == 1
    assert told.last_exit is not None and f"engine: exit {code}" in told.last_exit.words


def test_what_was_ready_once_is_tried_again_whatever_it_says(tmp_path: Path) -> None:
    with supervised(tmp_path, "ready 70", "exit 2", "ready"):
        assert reach(tmp_path, "ready", restarts=2).restarts == 2


def test_an_engine_that_lived_long_counts_from_one_again(tmp_path: Path) -> None:
    with supervised(tmp_path, *["ready 70"] * 4, "ready", pauses=[0.01], stable_seconds=0.0):
        assert reach(tmp_path, "ready", restarts=4).restarts == 4


def test_an_engine_that_ends_well_ends_all(tmp_path: Path) -> None:
    with supervised(tmp_path, "ready 0") as process:
        assert process.wait(WAIT) == 0
    assert place_of(tmp_path).read() is None and len(starts(tmp_path)) == 1
    assert list((tmp_path / "run").iterdir()) == []


def test_the_end_is_passed_on_and_leaves_nothing(tmp_path: Path) -> None:
    with supervised(tmp_path, "ready") as process:
        engine = reach(tmp_path, "ready").engine
        assert engine is not None and place_of(tmp_path).is_running
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0 and not psutil.pid_exists(engine)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_end_comes_in_a_pause_too(tmp_path: Path) -> None:
    with supervised(tmp_path, "ready 70", pauses=[600.0]) as process:
        reach(tmp_path, "waiting")
        process.terminate()
        assert process.wait(WAIT) == 0
    assert len(starts(tmp_path)) == 1


def test_an_engine_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, "deaf", stop_seconds=0.3) as process:
        engine = reach(tmp_path, "ready").engine
        process.terminate()
        assert process.wait(WAIT) == 0
        assert engine is not None and not psutil.pid_exists(engine)


def test_a_supervisor_that_is_killed_takes_the_engine_along(tmp_path: Path) -> None:
    with supervised(tmp_path, "ready") as process:
        engine = reach(tmp_path, "ready").engine
        process.kill()
        process.wait(WAIT)
        assert engine is not None
        until(lambda: not psutil.pid_exists(engine))
    assert not place_of(tmp_path).is_running and state(tmp_path).phase == "ready"


def test_exit_codes_in_words() -> None:
    assert how(-9) == "killed by SIGKILL" and how(2) == "a setting is wrong (exit code 2)"
    assert how(33) == "it ended (exit code 33)"
