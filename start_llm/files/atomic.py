"""A file that is replaced as a whole: readers, and whoever comes after a kill, find the old bytes or the new ones."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

UNFINISHED = ".writing"  # the ending of a file that is being written; one that a killed process left may be removed


def write_atomic(path: Path, data: bytes | str | list[bytes], *, mode: int = 0o600, sync: bool = False) -> None:
    """Writes `data` (text as UTF-8, parts one after the other) under another name and renames that.

    Args:
        path: in a folder that exists. A link in its place is replaced, not followed.
        mode: of the file, less the umask.
        sync: return only when a power failure cannot undo it.

    Raises:
        OSError: `path` is as it was before.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(fresh, flags, mode), "wb") as file:
            file.writelines(data if isinstance(data, list) else [data.encode() if isinstance(data, str) else data])
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_anything(path: Path) -> None:
    """Removes a file, a link (not what it leads to) or a whole folder; nothing may be there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
