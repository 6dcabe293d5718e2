"""All tests run side by side; what somebody names runs in one process, with its prints and its debugger."""

from __future__ import annotations

import logging
import os
import ssl
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis.internal.conjecture import providers

from tests.conftest import COLLECTED, MOST_WORKERS, cores, pytest_xdist_auto_num_workers
from tests.lazy import SHARED, SLOW_TO_IMPORT, shared

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("folder", "named", "side_by_side"),
    [
        (ROOT, ["tests"], True),  # as `testpaths` says
        (ROOT, ["tests/"], True),
        (ROOT / "docs", [str(ROOT / "tests")], True),
        (ROOT, ["tests/e2e"], False),
        (ROOT, ["tests/test_app.py"], False),
        (ROOT, ["tests/test_app.py::test_before_loading_requests_get_503"], False),
        (ROOT, ["tests/core", "tests/api"], False),
    ],
)
def test_how_many_workers_there_are(folder: Path, named: list[str], side_by_side: bool) -> None:
    config: Any = SimpleNamespace(args=named, invocation_params=SimpleNamespace(dir=folder))
    workers = min(MOST_WORKERS, cores() + 1)
    assert pytest_xdist_auto_num_workers(config) == (workers if side_by_side else 0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores can be given to a process on Linux")
def test_only_cores_that_the_tests_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    config: Any = SimpleNamespace(args=["tests"], invocation_params=SimpleNamespace(dir=ROOT))
    assert pytest_xdist_auto_num_workers(config) == 2


def test_no_file_imports_what_is_slow_while_it_is_collected(request: pytest.FixtureRequest) -> None:
    """Every worker collects all files: take it from `tests.lazy` there."""
    assert request.config.stash[COLLECTED] & set(SLOW_TO_IMPORT) == set()


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_test_says_of_the_log_ends_with_it(number: int) -> None:
    """A program that is run in this process does it."""
    ours = logging.getLogger("start_llm")
    assert ours.level == logging.NOTSET
    ours.setLevel(logging.ERROR)


def test_no_example_is_drawn_from_what_happens_to_be_imported(request: pytest.FixtureRequest) -> None:
    """It would be another one in another order of the tests."""
    if request.config.getoption("--slow"):
        pytest.skip("new examples are looked for")
    assert not any(providers.HypothesisProvider(None)._local_constants.__dict__.values())


def test_files_that_import_the_same_slow_packages_come_to_one_worker() -> None:
    kinds = Counter(shared(str(path.relative_to(ROOT))) for path in (ROOT / "tests").rglob("test_*.py"))
    assert set(kinds) == {"", *SHARED} and all(kinds[kind] > 1 for kind in SHARED)


def test_a_second_client_reads_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx.Client().close()
    read: list[object] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: read.append(1))
    httpx.Client().close()
    assert not read


def test_by_itself_it_waits_for_a_minute() -> None:
    assert httpx.Client().timeout == httpx.AsyncClient().timeout == httpx.Timeout(60.0)
