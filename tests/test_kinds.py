"""The kinds of tests: what a run has, that no test starts what its kind does not tell. How many run side by side."""

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
from tests.kinds import RUN, kind_of, rounds, some
from tests.lazy import SHARED, SLOW_TO_IMPORT, shared

pytest_plugins = "pytester"

TESTS = """
import subprocess, sys
import pytest

def test_pure(): ...
@pytest.mark.live
def test_live(): subprocess.run([sys.executable, "-c", ""])
@pytest.mark.thorough
def test_thorough(): ...
@pytest.mark.smoke
def test_smoke(): ...
@pytest.mark.slow
def test_slow(): ...
@pytest.mark.e2e
def test_e2e(): ...
@pytest.fixture
def proxy(): ...
def test_by_fixture(proxy): ...
def test_lacks(): pytest.skip("needs a browser: apt install chromium")
"""
LEFT = "not part of this run: 1 e2e, 2 live, 1 slow, 1 thorough*"
PLANTED = """
import subprocess, sys

def test_starts_unmarked(): subprocess.run([sys.executable, "-c", ""])
def test_looks_at_the_machine(): subprocess.run(["uname"])
"""
PLUGIN = """
import pytest
from tests.kinds import OPTIONS, Kinds

def pytest_addoption(parser):
    for name in OPTIONS:
        parser.addoption(f"--{name}", action="store_true")

def pytest_configure(config):
    for mark in ("live", "smoke", "thorough", "slow", "e2e"):
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(Kinds(config), "kinds")
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(PLUGIN)
    return pytester


@pytest.mark.parametrize(
    ("marks", "fixtures", "kind"),
    [
        ({"smoke", "slow"}, set(), "slow"),
        ({"thorough"}, {"proxy"}, "live"),
        ({"smoke"}, {"proxy"}, "smoke"),
        ({"slow", "live"}, set(), "slow"),
        ({"e2e", "smoke"}, set(), "smoke"),
    ],
)
def test_a_test_has_one_kind(marks: set[str], fixtures: set[str], kind: str) -> None:
    assert kind_of(marks, fixtures) == kind


def test_what_is_not_in_a_run_is_deselected_and_what_lacks_something_is_told(run: pytest.Pytester) -> None:
    run.makepyfile(TESTS)
    result = run.runpytest("-p", "no:xdist")
    result.assert_outcomes(passed=2, skipped=1, deselected=5)
    result.stdout.fnmatch_lines(["not run, 1 tests: needs a browser: apt install chromium", LEFT])


@pytest.mark.smoke
@pytest.mark.parametrize(("option", "passed"), [("--all", 5), ("--slow", 6), ("--e2e", 3)])
def test_what_a_run_has(run: pytest.Pytester, option: str, passed: int) -> None:
    run.makepyfile(TESTS)
    run.runpytest("-p", "no:xdist", option).assert_outcomes(passed=passed, skipped=1)


@pytest.mark.smoke
def test_who_starts_a_process_and_does_not_say_so_is_found(run: pytest.Pytester) -> None:
    run.makepyfile(PLANTED)
    result = run.runpytest("-p", "no:xdist")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*it starts a process (subprocess.Popen): mark it live*"])


@pytest.mark.live
def test_workers_tell_what_they_left_out(run: pytest.Pytester) -> None:
    run.makepyfile(TESTS)
    run.runpytest("-n", "1").stdout.fnmatch_lines([LEFT])


def test_a_short_run_tries_a_quarter_of_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, "whole", False)
    assert (rounds(40), rounds(40, 4)) == (10, 4)
    monkeypatch.setattr(RUN, "whole", True)
    assert (rounds(40), rounds(40, 4)) == (40, 40)


def test_some_values_of_a_parameter_are_for_every_run_and_the_others_for_all() -> None:
    made = some([*range(8), (8, "b"), pytest.param(9, id="nine", marks=pytest.mark.slow)], 3)
    assert [place for place, param in enumerate(made) if not param.marks] == [0, 3, 6]
    assert [param.values for param in made[-2:]] == [(8, "b"), (9,)] and made[-1].id == "nine"
    assert [{mark.name for mark in param.marks} for param in made[-2:]] == [{"thorough"}, {"slow", "thorough"}]


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
