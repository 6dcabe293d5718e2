"""Log files that stay within bounds, whoever writes them and for however long."""

from __future__ import annotations

import glob
import os
import re
import stat
import threading
from contextlib import suppress
from pathlib import Path

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_SHARE = 8  # one file is at most this part of all
_LOOKS = 32  # the folder is looked through once for each such part of the bytes
_OLDER = ".1"
_TAIL_BYTES = 65_536


class DailyLogs:
    """Lines in files of one folder a day: ``ROOT/2026-11-21/NAME``. The oldest files go when all take too much.

    Thread-safe. Only files of `suffix` in folders that are named like a day are ever deleted.

    Args:
        root: made at the first line.
        suffix: of every file's name: ``.jsonl``.
        most_bytes, most_files: of all files together. One file is at most an eighth of the bytes; then its lines so far
            go to ``NAME.1``, and what was there before is dropped.
    """

    def __init__(self, root: Path, suffix: str, most_bytes: int, most_files: int = 10_000) -> None:
        self._root = root
        self._suffix = suffix
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._lock = threading.Lock()
        self._bytes_to_look = 0
        self._files_to_look = 0

    def append(self, day: str, name: str, line: str) -> None:
        """Adds a line, readable by this user only. Raises OSError."""
        data = (line + "\n").encode("utf-8", "replace")
        path = os.path.join(self._root, day, name)  # not a `Path`: Python 3.12 keeps each part of one for good
        with self._lock:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                size = 0
                self._files_to_look -= 1
            if size and size + len(data) > self._most_bytes // _SHARE:
                os.replace(path, path + _OLDER)
            with open(path, "ab", opener=_private) as file:
                file.write(data)
            self._bytes_to_look -= len(data)
            if self._bytes_to_look <= 0 or self._files_to_look <= 0:
                self._prune(path)

    def _prune(self, current: str) -> None:
        files: list[tuple[str, float, int, str]] = []  # day's folder, last change, bytes, path
        for path in glob.iglob(os.path.join(glob.escape(str(self._root)), "*", "*")):
            day, name = os.path.split(path.removesuffix(_OLDER))
            if not _DAY.fullmatch(os.path.basename(day)) or os.path.islink(day) or not name.endswith(self._suffix):
                continue
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                if not stat.S_ISDIR(status.st_mode):
                    files.append((day, status.st_mtime, status.st_size, path))
        files.sort()
        used = sum(size for _, _, size, _ in files)
        left = len(files)
        # A little below the bounds, so that not every line has to look again.
        for day, _, size, path in files:
            if used <= self._most_bytes - self._most_bytes // _SHARE and left <= self._most_files * 9 // 10:
                break
            if path == current:
                continue
            with suppress(OSError):
                os.unlink(path)
                used, left = used - size, left - 1
                os.rmdir(day)  # fails while there is something in it
        self._bytes_to_look = self._most_bytes // _LOOKS
        self._files_to_look = self._most_files // 20


def begin_log(path: Path, *, go_on: bool = False) -> int:
    """A descriptor of an empty log, for another program's output; where it cannot be opened, one that goes nowhere.

    What was there before is kept once, as ``NAME.1``. With `go_on` the log goes on: it is of the same run.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not go_on:
            with suppress(FileNotFoundError):
                os.replace(path, path.with_name(path.name + _OLDER))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def trim_log(path: Path, most_bytes: int) -> None:
    """If a log that another program appends to is longer than `most_bytes`, only its last quarter of that is kept.

    A line that is written in this moment may be lost.
    """
    with suppress(OSError):
        if path.stat().st_size <= most_bytes:
            return
        with open(path, "r+b") as file:
            file.seek(-(most_bytes // 4), os.SEEK_END)
            kept = file.read()
            file.truncate(0)
        with open(path, "ab") as file:
            file.write(b"(earlier lines were dropped)\n" + kept.partition(b"\n")[2])


def last_lines(path: Path, count: int, begin: int = 0) -> str:
    """The last whole lines of a log, but none before byte `begin`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(min(begin, size), size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    whole = text.splitlines()[1 if start > begin else 0 :]  # half a key would not be known as one
    return "\n".join([line for line in whole if line.strip()][-count:])


def _private(path: str, flags: int) -> int:
    """A log quotes conversations: it is its owner's only."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)  # a pipe in its place must not hang
