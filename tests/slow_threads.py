"""A plugin that makes rare orders of threads common: what passes with it passes beside busy neighbours, too.

``SLOW_THREAD=model python -m pytest -n 0 -p tests.slow_threads tests/integration/test_pool.py`` lets the threads whose
names begin so sleep whenever they enter a function of the package or of the tests, for a second and a half a test.
Names are ``model``, ``recorder``, ``api-``, ``kv-disk``, ``drafts``, ``loader``, ``MainThread`` (the test itself);
``-MainThread``: all others.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
PLACES = (f"{ROOT / 'start_llm'}/", f"{ROOT / 'tests'}/")
NAME = os.environ.get("SLOW_THREAD", "MainThread")
SECONDS, IN_A_TEST = 0.025, 1.5
_left, _random = [0.0], random.Random(1)


def pytest_configure() -> None:
    watching = sys.monitoring
    watching.use_tool_id(watching.PROFILER_ID, "slow threads")
    watching.register_callback(watching.PROFILER_ID, watching.events.PY_START, _enter)
    watching.set_events(watching.PROFILER_ID, watching.events.PY_START)


def pytest_unconfigure() -> None:
    sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
    sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)


def pytest_runtest_setup() -> None:
    _left[0] = IN_A_TEST


def _enter(code: CodeType, _: int) -> object:
    if not code.co_filename.startswith(PLACES):
        return sys.monitoring.DISABLE
    if _left[0] > 0 and threading.current_thread().name.startswith(NAME.removeprefix("-")) != NAME.startswith("-"):
        seconds = SECONDS * _random.choice((1, 1, 1, 1, 4))
        _left[0] -= seconds
        time.sleep(seconds)
    return None
