"""The child process in which recordings are decoded and PDF files read: a script that knows nothing of the server.

`decoder` starts it and speaks to it. It reads orders from its standard input and answers on its standard output. It
ends when its input ends, so it never outlives the server.

libsndfile decodes, pypdf reads. Whatever a file makes them do costs one process, which has limits of memory and
processor time for each order.

- An order: one byte (`LOOK`, `DECODE` or `TEXT`), the size of the file (8 bytes), the file.
- An answer consists of parts: one byte (`PART` or `REFUSED`), the size of what follows (8 bytes), and that.
- To `LOOK`: one part with sample rate and frames (8 bytes each). To `DECODE`: parts with samples (float32, all channels
  mixed), then an empty one. To `TEXT`: one part with the text of a PDF file. `REFUSED` comes with a sentence and ends
  any answer.
- An empty part comes by itself when the child has started.
"""

from __future__ import annotations

import importlib
import io
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

LOOK, DECODE, TEXT = b"L", b"D", b"T"
PART, REFUSED = b"P", b"X"
LENGTH = struct.Struct("<Q")
SHAPE = struct.Struct("<QQ")
MEMORY = 256 << 20  # bytes that an order may take, beyond twice its file
SECONDS = 30  # of a processor, for one order. Two hours take 1 to 10 of them.
MOST_PAGES, MOST_CHARS = 500, 2_000_000  # of a PDF file
FAULTS = (RuntimeError, ValueError, TypeError, ArithmeticError, OSError, LookupError, AttributeError, AssertionError)
"""What libraries raise of a damaged file."""
FRAMES = 1 << 15  # of a part: a file may have a thousand channels


def main(soundfile: Any) -> None:
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    limits = Limits()
    _say(answers, PART, b"")
    while order := orders.read(1):
        data = orders.read(LENGTH.unpack(orders.read(LENGTH.size))[0])
        limits.set_for(len(data))
        try:
            if order == TEXT:
                _say(answers, PART, _pdf_text(data).encode())
                continue
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                shape = SHAPE.pack(file.samplerate, max(0, file.frames))
                for part in [shape] if order == LOOK else _decode(file):
                    _say(answers, PART, part)
        except MemoryError:
            _say(answers, REFUSED, b"it takes too much memory")
        except (soundfile.SoundFileError, *FAULTS) as error:
            _say(answers, REFUSED, str(error).encode()[:200])


def _pdf_text(data: bytes) -> str:
    """The text of each page under a line with its number. Raises ValueError: why there is none; `FAULTS`."""
    pypdf = importlib.import_module("pypdf")
    try:
        return _pages_text(pypdf.PdfReader(io.BytesIO(data)))
    except pypdf.errors.DependencyError as error:  # locked by AES or packed by Brotli, say
        raise ValueError(str(error)) from None
    except pypdf.errors.PyPdfError as error:
        raise ValueError(f"it is damaged ({error})") from None


def _pages_text(reader: Any) -> str:
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is locked by a password")
    count = len(reader.pages)
    if count > MOST_PAGES:
        raise ValueError(f"it has {count} pages, and {MOST_PAGES} are read at most")
    pages, chars = [], 0
    for page in reader.pages:
        halves = page.extract_text().encode("utf-16", "surrogatepass")  # a font may name the halves of a sign alone
        pages.append(halves.decode("utf-16", "replace").replace("\0", "").strip())
        chars += len(pages[-1])
        if chars > MOST_CHARS:
            raise ValueError(f"it has over {MOST_CHARS:,} characters")
    if not chars:
        raise ValueError("there is no text in it, only pictures or nothing")
    return "\n\n".join(f"Page {number} of {count}:\n{text}" for number, text in enumerate(pages, 1))


def _say(answers: BinaryIO, kind: bytes, part: bytes) -> None:
    answers.write(kind + LENGTH.pack(len(part)) + part)
    answers.flush()


def _decode(file: Any) -> Iterator[bytes]:
    """All channels mixed, at the file's own rate; no more than it says that it has."""
    left = file.frames
    while left > 0 and len(piece := file.read(min(FRAMES, left), dtype="float32", always_2d=True)):
        yield piece.mean(axis=1).clip(-1.0, 1.0).tobytes()
        left -= len(piece)
    yield b""


# --- Limits -------------------------------------------------------------------


class Limits:
    """Of memory and time. Beyond that of time the system ends this process."""

    def __init__(self) -> None:
        self._at_start = self._most = _address_space()
        if not self._at_start:
            self._at_start = self._most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            threading.Thread(target=self._watch, daemon=True).start()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def set_for(self, size: int) -> None:
        """For an order whose file has `size` bytes."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS, hard))
        allowed = self._at_start + MEMORY + 2 * size
        if sys.platform == "linux":
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
        self._most = max(self._most, allowed)

    def _watch(self) -> None:
        """Where the system sets no limit (macOS): ends this process once it has taken more than any order may."""
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= self._most:
            time.sleep(0.05)
        os._exit(1)


def _address_space() -> int:
    """Bytes of this process; 0 where the system does not limit them."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    import soundfile

    main(soundfile)
