from __future__ import annotations

import sys

import pytest

from start_llm.host.awake import BEHIND_SECONDS, Awake, holder
from tests.waiting import until


def test_the_systems_commands_end_with_the_server() -> None:
    assert holder("darwin", 7) == ["caffeinate", "-i", "-w", "7"]
    linux = holder("linux", 7)
    assert linux[0] == "systemd-inhibit" and "--what=sleep:idle" in linux and "--pid=7" in linux
    assert holder("other", 7) == []


@pytest.mark.live
def test_it_holds_while_there_is_work_and_lets_go_behind_it() -> None:
    idle, low = [0.0], [False]
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    awake = Awake(lambda: idle[0], command, lambda: low[0])
    assert awake.look() and awake.look()
    first = awake._child
    assert first is not None and first.poll() is None
    idle[0] = BEHIND_SECONDS + 1
    assert awake.look() and awake._child is None and first.poll() is not None
    idle[0] = 0.0
    assert awake.look() and awake._child is not None
    low[0] = True  # the battery
    assert awake.look() and awake._child is None


@pytest.mark.live
def test_a_command_that_ends_or_is_not_there_is_not_tried_for_ever() -> None:
    ending = Awake(lambda: 0.0, [sys.executable, "-c", "raise SystemExit(3)"], lambda: False)
    assert ending.look()
    until(lambda: ending._child is not None and ending._child.poll() is not None)
    assert not ending.look()
    assert not Awake(lambda: 0.0, ["/nothing/there"], lambda: False).look()
