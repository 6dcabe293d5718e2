"""A file that is replaced as a whole: readers, and whoever comes after a kill, find the old bytes or the new ones."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

UNFINISHED = ".writing"  # the ending of a file that is being written; one that a killed process left may be removed


def write_atomic(path: Path | str, data: bytes | str | list[bytes], *, mode: int = 0o600, sync: bool = False) -> None:
    """Writes `data` (text as UTF-8, parts one after the other) under another name and renames that.

    Args:
        path: in a folder that exists. A link in its place is replaced, not followed. A string where names are without
            end: Python 3.12 keeps each part of a `Path` for good.
        mode: of the file, less the umask.
        sync: return only when a power failure cannot undo it.

    Raises:
        OSError: `path` is as it was before.
    """
    parent, name = os.path.split(path)
    fresh = os.path.join(parent, f".{name}.{secrets.token_hex(4)}{UNFINISHED}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(fresh, flags, mode), "wb") as file:
            file.writelines(data if isinstance(data, list) else [data.encode() if isinstance(data, str) else data])
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        remove_anything(fresh)
        raise
    if sync:
        folder = os.open(parent or os.curdir, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_anything(path: Path | str) -> None:
    """Removes a file, a link (not what it leads to) or a whole folder; nothing may be there. Raises OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
