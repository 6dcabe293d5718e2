"""Decodes recordings and reads PDF files in a child process with limits: no file can end, fill or stop the server.

`decoder_child` is what runs there, and says what passes between the two. Knows nothing of models and requests.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from start_llm.audio.decoder_child import DECODE, LENGTH, LOOK, REFUSED, SECONDS, SHAPE, TEXT
from start_llm.core.errors import Unavailable

MOST_SECONDS = 600
"""For one file by the clock, with what the caller does with its samples: a child that hangs is ended, too."""
_REASONS = {
    -signal.SIGXCPU: f"it takes over {SECONDS} seconds of a processor",
    -signal.SIGKILL: "it takes too long, or too much memory",
}


class NotDecoded(Exception):
    """The file cannot be decoded; says why in a few words."""


class Decoder:
    """One child for all files, started by the first and again after each that ended it. Any thread.

    It works on one file at a time: others wait, no longer than the limits of those before them.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def look(self, data: bytes) -> tuple[int, int]:
        """(samples a second, samples of one channel), as the file says. Raises NotDecoded, Unavailable."""
        with self._order(LOOK, data) as answers:
            rate, frames = SHAPE.unpack(_part(answers))
        return rate, frames

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Samples, some at a time: float32, all channels mixed. Raises NotDecoded, Unavailable."""
        with self._order(DECODE, data) as answers:
            while piece := _part(answers):
                yield piece

    def text(self, data: bytes, seconds: float) -> tuple[str, float]:
        """Of a PDF file, page by page; and the seconds that it took, `seconds` at most. Raises NotDecoded, Unavailable.

        The wait for other files does not count.
        """
        with self._order(TEXT, data, seconds) as answers:
            began = time.monotonic()
            return _part(answers).decode(), time.monotonic() - began

    def close_child(self) -> None:
        """Ends the child; the next file starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    @contextlib.contextmanager
    def _order(self, order: bytes, data: bytes, seconds: float = MOST_SECONDS) -> Iterator[IO[bytes]]:
        """Sends an order; what comes back can be read. A child that is left before its answer's end, or that has not
        answered after `seconds`, is ended."""
        with self._turn:
            child = self._running()
            assert child.stdin and child.stdout
            late = threading.Timer(max(0.0, seconds), child.kill)
            late.daemon = True
            late.start()
            try:
                child.stdin.write(order + LENGTH.pack(len(data)))
                child.stdin.write(data)
                child.stdin.flush()
                yield child.stdout
            except NotDecoded:
                raise
            except (EOFError, BrokenPipeError):
                child.kill()
                code = child.wait()
                self.close_child()
                raise NotDecoded(_REASONS.get(code, f"its decoder ended with code {code}")) from None
            except BaseException:  # whoever read gave up in the middle
                self.close_child()
                raise
            finally:
                late.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        """The child, started if there is none. Raises Unavailable: it does not start."""
        if self._child is None or self._child.poll() is not None:
            self.close_child()
            script = Path(__file__).with_name("decoder_child.py")
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, whose end ends it
            )
            assert self._child.stdout
            try:
                _part(self._child.stdout)
            except EOFError:
                self.close_child()
                raise Unavailable("The process that reads recordings and PDF files does not start.") from None
        return self._child


def _part(answers: IO[bytes]) -> bytes:
    """The next part of an answer. Raises EOFError: the child has ended; NotDecoded: it says why it cannot."""
    kind, length = answers.read(1), answers.read(LENGTH.size)
    if len(length) < LENGTH.size:
        raise EOFError
    part = answers.read(LENGTH.unpack(length)[0])
    if kind == REFUSED:
        raise NotDecoded(part.decode(errors="replace"))
    return part
