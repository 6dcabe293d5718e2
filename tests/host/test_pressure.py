"""How short of memory the machine is, with a stand-in for each system."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from start_llm.host import pressure
from start_llm.host.pressure import (
    STEADY_SECONDS,
    MemoryWatch,
    Pressure,
    Reading,
    SteadyLevel,
    read_linux,
    reading_of_level,
)
from tests.waiting import until

NORMAL, WARNING, CRITICAL = Pressure
GIB = 2**30


def machine(
    root: Path, available: float, *, stall: float | None = 0.0, group: tuple[float, float] | None = None
) -> Path:
    """Files of a machine of 100 GiB. `group`: limit and use of its control group in GiB."""
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    kib = 100 * GIB // 1024
    text = f"MemTotal: {kib} kB\nMemFree: 1 kB\nMemAvailable: {int(kib * available)} kB\nHugePages_Total: 0\n"
    (root / "proc/meminfo").write_text(text)
    if stall is not None:
        (root / "proc/pressure/memory").write_text(
            f"some avg10={stall} avg60=0 avg300=0 total=1\nfull avg10=0 total=1\n"
        )
    if group is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{int(group[0] * GIB)}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{int(group[1] * GIB)}\n")
        (root / "sys/fs/cgroup/memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    return root


@pytest.mark.parametrize(
    ("available", "stall", "level", "calm"),
    [
        (0.50, 0.0, NORMAL, NORMAL),
        (0.50, 99.0, NORMAL, NORMAL),  # a full control group of another program
        (0.13, 20.0, WARNING, WARNING),
        (0.10, 0.0, NORMAL, WARNING),
        (0.07, 0.0, WARNING, WARNING),
        (0.06, 0.0, WARNING, CRITICAL),
        (0.15, 50.0, CRITICAL, CRITICAL),
        (0.02, 0.0, CRITICAL, CRITICAL),
        (0.02, None, CRITICAL, CRITICAL),  # a kernel without PSI
    ],
)
def test_linux_says_what_is_available(
    tmp_path: Path, available: float, stall: float | None, level: Pressure, calm: Pressure
) -> None:
    assert read_linux(machine(tmp_path, available, stall=stall)) == Reading(level, calm)


def test_a_control_group_counts_where_it_has_less_left(tmp_path: Path) -> None:
    assert read_linux(machine(tmp_path, 0.5, group=(10, 5))).level is NORMAL
    assert read_linux(machine(tmp_path, 0.5, group=(10, 10.8))).level is CRITICAL  # one of them files that can go
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert read_linux(tmp_path).level is NORMAL


@pytest.mark.parametrize(("number", "level"), [(1, NORMAL), (2, WARNING), (4, CRITICAL)])
def test_macos_says_a_level(number: int, level: Pressure) -> None:
    assert reading_of_level(number) == Reading(level, level)


def test_this_machine_can_be_asked_or_says_that_it_cannot() -> None:
    heard: list[Pressure] = []
    watch = MemoryWatch(lambda level, changed: heard.append(level))
    watch.start()
    watch.stop()


def test_the_level_rises_at_once_and_falls_when_it_is_calm() -> None:
    steady = SteadyLevel()
    assert steady.hear(Reading(WARNING, WARNING), 0.0) and steady.level is WARNING
    assert steady.hear(Reading(CRITICAL, CRITICAL), 0.5) and steady.level is CRITICAL
    assert not steady.hear(Reading(NORMAL, NORMAL), 5.0)
    assert not steady.hear(Reading(NORMAL, CRITICAL), 30.0)  # not calm yet
    assert steady.hear(Reading(NORMAL, WARNING), 30.5) and steady.level is WARNING
    assert not steady.hear(Reading(NORMAL, NORMAL), 30.6)
    assert steady.hear(Reading(NORMAL, NORMAL), 41.0) and steady.level is NORMAL


@pytest.mark.parametrize("seed", range(5))
def test_at_an_edge_it_changes_once_in_ten_seconds_at_most(seed: int) -> None:
    steady, draw, changes = SteadyLevel(), random.Random(seed), list[tuple[float, Pressure]]()
    for look in range(2000):
        level = draw.choice([NORMAL, WARNING])
        if steady.hear(Reading(level, level), look / 2):
            changes.append((look / 2, steady.level))
    assert len(changes) > 10
    assert all(later - sooner >= STEADY_SECONDS for (sooner, _), (later, _) in pairwise(changes))


def test_it_is_told_again_while_memory_is_short_and_a_look_that_fails_is_not_the_last_one() -> None:
    levels: list[Pressure | None] = [NORMAL, NORMAL, None, WARNING]
    heard: list[tuple[Pressure, bool]] = []

    def read() -> Reading:
        if (level := levels.pop(0) if len(levels) > 1 else WARNING) is None:
            raise OSError("gone")
        return Reading(level, level)

    watch = MemoryWatch(lambda level, changed: heard.append((level, changed)), read)
    watch.start()
    until(lambda: len(heard) >= 2)
    watch.stop()
    assert heard[:2] == [(WARNING, True), (WARNING, False)]


def test_free_memory_goes_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = list[int]()
    monkeypatch.setattr(pressure, "_TRIM_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "trim_heaps", lambda: trimmed.append(1))
    watch = MemoryWatch(lambda level, changed: None, lambda: Reading(NORMAL, NORMAL))
    watch.start()
    until(lambda: len(trimmed) > 1)
    watch.stop()


def test_a_system_that_says_nothing_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> Reading:
        raise AttributeError("sysctlbyname")

    watch = MemoryWatch(lambda level, changed: None, read)
    with caplog.at_level("INFO"):
        watch.start()
    assert "does not say how short" in caplog.text
    watch.stop()
