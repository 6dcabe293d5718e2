"""How much memory the C library keeps that nobody uses."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # <malloc.h>
_ARENAS = 2
_LARGE = 1 << 17


def bound_heaps() -> bool:
    """Lets glibc keep two heaps, not eight for each core, and nothing large in them. To be called before threads are
    started.

    Each thread takes memory from a heap of its own, and what is freed in one is of no use to another. With dozens of
    HTTP threads the process grew by what lay free in them: 100 MB in three minutes of a storm, ten with two heaps.
    Large pieces go back to the system when they are freed. By itself glibc takes pieces of up to 32 MB from its heaps
    once such a piece was freed, and small ones that are kept then lie between the holes: an hour of a storm grew by 4%
    with pieces of up to 1 MiB in them, and by 1% with this bound.
    Returns False where the C library is another one; macOS has no such heaps.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_ARENA_MAX, _ARENAS) and mallopt(_M_MMAP_THRESHOLD, _LARGE))


def trim_heaps() -> None:
    """Gives free pages of glibc's heaps back to the system, in some milliseconds; by itself glibc gives back those at a
    heap's end only. Does nothing where the C library is another one."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
