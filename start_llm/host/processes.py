"""Processes of this machine: which one a number means, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

POLL_SECONDS = 0.05


def created(pid: int) -> float:
    """When the process began, by which another one of the same number is told from it; 0.0 if there is none."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def running(pid: int, began: float) -> psutil.Process | None:
    """The process of this number that was created then, if it still runs."""
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == began else None
    except psutil.Error:
        return None


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it is done within so many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
