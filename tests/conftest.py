"""What every test may use: the kinds of tests (`tests.kinds`), the embedded model."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from start_llm.dashboard.progress import ProgressLines
from start_llm.dashboard.terminal import LiveRows
from start_llm.host.blas import known
from tests.kinds import OPTIONS, RUN, Kinds
from tests.lazy import shared
from tests.waiting import PATIENCE_SECONDS

LONGEST = {"engine", "fuzz", "integration", "prompt", "proxy", "scripts", "service", "stress", "vision"}
LONGEST |= {"test_session", "test_small_model"}  # of the agents
MOST_WORKERS = 4  # each has its own MLX, which uses every core by itself
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The modules that were imported when all tests were collected."""
# How long an example takes says how busy the machine is; pytest-timeout ends what hangs.
hypothesis_settings.register_profile("start_llm", deadline=None, derandomize=True)
hypothesis_settings.register_profile("start_llm-short", deadline=None, derandomize=True, max_examples=25)
hypothesis_settings.register_profile("start_llm-slow", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Every run tries the same examples, so that it fails by what was changed; with `--slow` it looks for new ones."""
    _quick_processes()
    config.pluginmanager.register(Kinds(config), "kinds")
    RUN.whole = bool(config.getoption("--all") or config.getoption("--slow"))
    # A model that is asked something while it is loaded would be in the way of tests that count what a model does.
    os.environ.setdefault("MODEL_PROBE", "off")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises PyTorch
    whole = "start_llm-slow" if config.getoption("--slow") else "start_llm"
    hypothesis_settings.load_profile(whole if RUN.whole else "start_llm-short")
    if not config.getoption("--slow"):
        # Constants of all modules that are imported at that time: other examples with each order of the tests.
        providers._get_local_constants = lambda: providers._local_constants


def _quick_processes() -> None:
    """What makes processes that are started from here cheap: workers of pytest-xdist, servers."""
    # Without kept bytecode each process compiles all that it imports: 15 s for LiteLLM alone.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # With it float32 products are thirty times quicker, and a server need not begin again to get it.
    if sys.platform == "linux" and "LD_PRELOAD" not in os.environ and (preload := known(Path(sys.prefix))):
        os.environ["LD_PRELOAD"] = preload
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # products are small here, and its threads wait by computing


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers `-n auto` means: one more than cores for all tests, none for what somebody names.

    Only the cores that this process may use count: a container or `taskset` may give it a few of many.
    """
    named = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    if named != [Path(__file__).resolve().parent]:
        return 0
    return min(MOST_WORKERS, cores() + 1)  # a fifth of the time a test waits for a process or a clock


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """By file, as `--dist` says; without ``--all`` files that import the same slow packages come to one worker."""
    return None if RUN.whole or config.getoption("dist") != "loadfile" else Together(config, log)


class Together(LoadFileScheduling):
    """Gives all files of a kind in `lazy.SHARED` to one worker: what they import takes seconds of each worker."""

    def _split_scope(self, nodeid: str) -> str:
        path: str = super()._split_scope(nodeid)
        return shared(path) or path


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in OPTIONS.items():
        parser.addoption(f"--{name}", action="store_true", help=f"run {what}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: side by side, the last files to end are then short ones."""
    items.sort(key=lambda item: LONGEST.isdisjoint((item.path.parent.name, item.path.stem)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected stays: looking for garbage in it is work for nothing, now and in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)  # as often as by itself it takes a tenth of the computing
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetches the embedded model before the first test, so that a slow network is not taken for a test that hangs."""
    if session.config.getoption("collectonly"):
        return
    session.config.stash[COLLECTED] = frozenset(sys.modules)
    for item in session.items:
        if "smol_path" in getattr(item, "fixturenames", ()):
            embedded_model()
            return


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws without a seed is the same in every run. MLX has a seed for each thread: this one's."""
    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)


def _log_levels_as_before() -> Generator[None]:
    """A program that is run in this process says what is logged: not for the tests behind it."""
    loggers = (logging.getLogger(), logging.getLogger("start_llm"))
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:  # setting it takes as long as a short test
            logger.setLevel(level)


_after_each_test = pytest.fixture(autouse=True)(_log_levels_as_before)
_after_each_module = pytest.fixture(autouse=True, scope="module")(_log_levels_as_before)


@pytest.fixture(scope="session", autouse=True)
def _models_are_trusted() -> Generator[None]:
    """A child process for each of the tests' models would take longer than the tests; `test_inspection` has it."""
    from start_llm.engine import checks
    from start_llm.models import inspection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "_inspect", lambda *_: None)
        patch.setattr(checks, "check_decoding", _nothing_found)
        yield


def _nothing_found(*_: object) -> Generator[float, None, None]:
    """In place of the check that each new model goes through: tests count what a model computes."""
    yield from ()


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has its index of drafts at its first token. By itself the index comes when its thread has had its turn."""
    from start_llm.engine.decode.drafting import Drafts

    begin = Drafts.begin

    def waiting(drafts: Any, work: Any, generated: Any) -> Any:
        row = begin(drafts, work, generated)
        drafts._builder.submit(lambda: None).result(PATIENCE_SECONDS)  # it builds one index after the other
        return row

    monkeypatch.setattr(Drafts, "begin", waiting)


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """The embedded model in float32, made once and kept in the user's cache folder."""
    return embedded_model()


def embedded_model() -> Path:
    from start_llm.models.embedded import ensure_embedded_model  # imports transformers, which the controller needs not

    folder = os.environ.get("START_LLM_CACHE_DIR", "~/.cache/start_llm")
    lines = ProgressLines(lambda line: print(line, file=sys.stderr), LiveRows(None))
    return ensure_embedded_model(Path(folder).expanduser(), quantised=False, progress=lines)
