from __future__ import annotations

import os

import psutil

from start_llm.host.processes import created, running, wait_until


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    assert running(os.getpid(), created(os.getpid())) == psutil.Process()
    assert running(os.getpid(), 1.0) is None and running(2**22 - 1, created(2**22 - 1)) is None


def test_it_waits_until_something_is_done_and_not_for_ever() -> None:
    looks = iter([False, False, True])
    assert wait_until(lambda: next(looks), 60) and not wait_until(lambda: False, 0)
