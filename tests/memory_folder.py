"""Temporary folders in memory, for tests that would otherwise mostly wait for `fsync` on a busy disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_MEMORY = "/dev/shm"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty folder, gone at the end. On a system without a file system in memory it is an ordinary one."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="start_llm-test-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
