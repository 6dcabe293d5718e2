"""Memory that one thread gave back is taken by the next one, on Linux with glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such heaps"),
]


def said(program: str, how: str) -> str:
    command = [sys.executable, "-c", HEAD + program, how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


HEAD = """
import ctypes, psutil, sys, threading
from start_llm.host.heap import bound_heaps, trim_heaps
if sys.argv[1] == "bound":
    assert bound_heaps()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
"""
HEAPS = """
together = threading.Barrier(24)
def take():
    together.wait()
    c.malloc(1000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(24)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
c.malloc_info(0, ctypes.c_void_p.in_dll(c, "stdout"))
c.fflush(None)
"""


def test_threads_share_two_heaps() -> None:
    assert said(HEAPS, "bound").count("<heap ") == 2 < said(HEAPS, "as it is").count("<heap ")


LARGE = """
c.free(c.malloc(16 << 20))
[c.malloc(256 << 10) for _ in range(16)]
class Told(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]
c.mallinfo2.restype = Told
print(c.mallinfo2().hblkhd >> 20)
"""


def test_what_is_large_is_in_no_heap() -> None:
    assert int(said(LARGE, "bound")) >= 4 > int(said(LARGE, "as it is"))


HOLES = """
pieces = [c.malloc(100_000) for _ in range(400)]
for piece in pieces:
    ctypes.memset(piece, 1, 100_000)
for piece in pieces[:-1]:
    c.free(piece)
before = psutil.Process().memory_info().rss
trim_heaps()
print(before - psutil.Process().memory_info().rss)
"""


def test_what_lies_free_below_something_kept_goes_back() -> None:
    assert int(said(HOLES, "bound")) > 30_000_000
