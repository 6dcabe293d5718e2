"""What kinds of tests there are, which of them a run has, and what was left out.

A test's kind is what it starts, not how long it takes:

- most compute in this process: *pure* ones, and those on the oracle model, also behind a server on a thread of it.
- `live`: it starts a process: a server, the proxy, a browser, an agent.
- `smoke`: a live one that every run has.
- `thorough`: many rounds, sizes or models of a check that a shorter test makes, too.

A run has neither `live` nor `thorough`, but for `smoke`; with ``--all`` it has everything but `slow` and `e2e`. What is
not in a run is deselected. What is skipped lacks something on this machine, and is told at the end with its remedy.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

OPTIONS = {
    "all": "every test but those marked slow and e2e, as CI does",
    "slow": "also what takes over ten seconds and has a shorter form; implies --all",
    "e2e": "also what drives real agent clients",
}
LIVE_FIXTURES = frozenset({"browser", "macs", "ours", "page", "proxied", "proxy", "selector", "web", "window"})
"""Fixtures that start a process; whoever asks for one is `live`."""
_STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"})
"""Audit events of a new process (https://docs.python.org/3.12/library/audit_events.html)."""
_LOOKS = frozenset(
    {"cc", "fc-list", "file", "gcc", "g++", "ld", "ldconfig", "lsb_release", "objdump", "system_profiler", "uname"}
)
"""Programs by which libraries look at the machine, once a process: whichever test is the first to use them."""


RUN = SimpleNamespace(whole=True)
"""Whether all that CI runs was asked for; known before any test file is read."""


def rounds(full: int, short: int = 0) -> int:
    """How often something drawn is tried: `full` times with ``--all``, else `short` times, by itself a quarter."""
    return full if RUN.whole else short or full // 4


def some(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The values of a parameter: as many as said, spread over all of them, for every run; the others are `thorough`.

    A tuple has the values of several parameters.
    """
    param = type(pytest.param())
    given = [each if isinstance(each, param) else _param(each) for each in values]
    kept = {number * len(given) // quick for number in range(quick)}
    return [
        each if place in kept else pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.thorough])
        for place, each in enumerate(given)
    ]


def _param(value: Any) -> Any:
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def kind_of(marks: set[str], fixtures: set[str]) -> str:
    """The part of a test run that a test belongs to."""
    for kind in ("slow", "smoke", "e2e", "live"):
        if kind in marks:
            return kind
    if fixtures & LIVE_FIXTURES:
        return "live"
    return "thorough" if "thorough" in marks else "quick"


def kinds_asked_for(options: set[str]) -> set[str]:
    kinds = {"quick", "smoke"}
    if options & {"all", "slow"}:
        kinds |= {"live", "thorough"}
    return kinds | (options & {"slow", "e2e"})


class Kinds:
    """The plugin: deselects, finds tests that start what their kind does not tell, and says at the end what is left."""

    def __init__(self, config: pytest.Config) -> None:
        self._asked = kinds_asked_for({name for name in OPTIONS if config.getoption(f"--{name}")})
        self._left: Counter[str] = Counter()
        self._started: set[str] = set()
        self._watching = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if self._watching and event in _STARTS and _program(given) not in _LOOKS:
            self._started.add(event)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """A test that somebody names with ``::`` runs, whatever its kind."""
        named = {word.split("::")[1].split("[")[0] for word in config.args if "::" in word}
        kept, left = [], []
        for item in items:
            kind = _kind(item)
            chosen = kind in self._asked or item.name.split("[")[0] in named
            (kept if chosen else left).append(item)
            self._left[kind] += not chosen
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._started.clear()
        self._watching = _kind(item) in {"quick", "thorough"}
        try:
            return (yield)
        finally:
            self._watching = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        done = yield
        if self._started:
            pytest.fail(f"it starts a process ({', '.join(sorted(self._started))}): mark it live", pytrace=False)
        return done

    # --- what is told at the end; pytest-xdist's workers hand their part over -----------------------

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["deselected"] = dict(self._left)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left = Counter(getattr(node, "workeroutput", {}).get("deselected", {})) | self._left

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reasons: Counter[str] = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"not run, {count} tests: {reason}")
        left = {kind: count for kind, count in sorted(self._left.items()) if count}
        if left:
            told = ", ".join(f"{count} {kind}" for kind, count in left.items())
            terminalreporter.write_line(f"not part of this run: {told} (--all has live and thorough ones)")


def _program(given: tuple[Any, ...]) -> str:
    """The name of what is started, ``""`` if it is not told."""
    path = given[0] if given else ""
    return os.path.basename(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""


def _kind(item: pytest.Item) -> str:
    return kind_of({mark.name for mark in item.iter_markers()}, set(getattr(item, "fixturenames", ())))


def _reason(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")
