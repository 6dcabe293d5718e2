"""Which private folder a launch gets: agents that run side by side never change it under one another.

An agent's folder keeps its sessions, so all its launches have the same one. A launch that needs another set-up while
the folder is in use (another server, the user's own set-up brought along or not) gets the next folder: ``pi-2``. Both
locks are on folders: whoever uses a folder shares its lock, and one launch at a time looks and sets up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from start_llm.clients.agent import LaunchPlan
from start_llm.files.locks import FileLock, locked

NOTE = ".set-up"
MOST = 100
WAIT_SECONDS = 60.0  # for another launch that sets up a folder


def set_up_of(plan: LaunchPlan, folder: Path, brought: str) -> str:
    """What `folder` is set up with: files of `plan`, and what of the user's own comes along."""
    files = {str(path.relative_to(folder)): text for path, text in sorted(plan.files.items())}
    return hashlib.sha256(json.dumps([files, brought]).encode()).hexdigest()


@contextmanager
def claimed(first: Path, wanted_in: Callable[[Path], str], set_up: Callable[[Path], None]) -> Iterator[Path]:
    """A folder that stays as it is while the block runs: `first`, or one named after it.

    `wanted_in`: see `set_up_of`. `set_up` is not called where a running agent has the same one already. Raises OSError:
    no folder can be made, or too many are in use.
    """
    first.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(first.parent, WAIT_SECONDS):
        folder, lock = _choose(first, wanted_in, set_up)
    try:
        yield folder
    finally:
        lock.drop()


def _choose(first: Path, wanted_in: Callable[[Path], str], set_up: Callable[[Path], None]) -> tuple[Path, FileLock]:
    """The folder, and its lock."""
    for number in range(1, MOST + 1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        folder.mkdir(exist_ok=True, mode=0o700)
        lock, wanted = FileLock(folder), wanted_in(folder)
        try:
            if lock.take():
                (folder / NOTE).unlink(missing_ok=True)
                set_up(folder)
                (folder / NOTE).write_text(wanted, "utf-8")  # only once all of it is there
                lock.share()
            elif _noted(folder) != wanted or not lock.take(shared=True):
                continue
        except BaseException:
            lock.drop()
            raise
        return folder, lock
    raise OSError(f"{MOST} agents run side by side, each with a folder of its own beside {first}")


def _noted(folder: Path) -> str:
    try:
        return (folder / NOTE).read_text("utf-8")
    except OSError:
        return ""
