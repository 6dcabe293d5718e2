"""The child process in which recordings are decoded: a script of its own, which knows nothing of the server.

`decoder` starts it and speaks to it. It reads orders from its standard input and answers on its standard output. It
ends when its input ends, so it never outlives the server.

The C decoders of miniaudio trust what a file says of itself: some files make them ask for gigabytes, write beyond their
memory or never end. Here that costs one process, which has limits of memory and processor time for each order.

- An order: one byte (`LOOK` or `DECODE`), the size of the file (8 bytes), the file.
- An answer consists of parts: one byte (`PART` or `REFUSED`), the size of what follows (8 bytes), and that.
- To `LOOK`: one part with sample rate and frames (8 bytes each). To `DECODE`: parts with a second of samples (16 bits,
  one channel), then an empty one. `REFUSED` comes with a sentence and ends any answer.
- An empty part comes by itself when the child has started.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

LOOK, DECODE = b"L", b"D"
PART, REFUSED = b"P", b"X"
LENGTH = struct.Struct("<Q")
SHAPE = struct.Struct("<QQ")
MEMORY = 256 << 20
"""Bytes that an order may take, beyond twice its file."""
SECONDS = 30
"""Of a processor, for one order. Two hours take 1 to 10 of them."""
LARGEST_PACKET = 16 << 20
"""Of the first three of a Vorbis file, in bytes: the second one may hold a picture."""


def main(miniaudio: Any) -> None:
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    limits = Limits()
    _say(answers, PART, b"")
    while order := orders.read(1):
        data = orders.read(LENGTH.unpack(orders.read(LENGTH.size))[0])
        limits.set_for(len(data))
        try:
            rate, frames = _look(miniaudio, data)
            for part in [SHAPE.pack(rate, frames)] if order == LOOK else _decode(miniaudio, data, rate, frames):
                _say(answers, PART, part)
        except MemoryError:
            _say(answers, REFUSED, b"it takes too much memory")
        except (miniaudio.MiniaudioError, ValueError, ArithmeticError, LookupError, OSError) as error:
            _say(answers, REFUSED, str(error).encode()[:200])


def _say(answers: BinaryIO, kind: bytes, part: bytes) -> None:
    answers.write(kind + LENGTH.pack(len(part)) + part)
    answers.flush()


def _look(miniaudio: Any, data: bytes) -> tuple[int, int]:
    """(samples a second, samples of a channel), from the header, and of an MP3 from that of each frame."""
    if data[:4] == b"OggS":
        check_vorbis(data)
    readers = {b"RIFF": miniaudio.wav_get_info, b"fLaC": miniaudio.flac_get_info, b"OggS": miniaudio.vorbis_get_info}
    found = readers.get(data[:4], miniaudio.mp3_get_info)(data)
    return found.sample_rate, found.num_frames


def _decode(miniaudio: Any, data: bytes, rate: int, frames: int) -> Iterator[bytes]:
    """All channels mixed, at the file's own rate; no more than `frames`, though more may come."""
    for piece in miniaudio.stream_memory(data, miniaudio.SampleFormat.SIGNED16, 1, rate, frames_to_read=rate):
        if frames > 0 and piece:
            yield piece[:frames].tobytes()
            frames -= len(piece)
        if frames <= 0:
            break
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


# --- Vorbis -------------------------------------------------------------------


def check_vorbis(data: bytes) -> None:
    """Raises ValueError: a header is cut, or claims what it does not hold. stb_vorbis allocates what they claim."""
    packets = _packets(data)
    first = next(packets)
    if len(first) != 30 or first[:7] != b"\x01vorbis":
        raise ValueError("it is no Ogg Vorbis")
    version, channels = struct.unpack_from("<IB", first, 7)
    small, large = first[28] & 15, first[28] >> 4
    if version or not 1 <= channels <= 8 or not 6 <= small <= large <= 13 or not first[29] & 1:
        raise ValueError("its Vorbis header is broken")
    comments = next(packets)
    if comments[:7] != b"\x03vorbis":
        raise ValueError("it has no Vorbis comments")
    at = _after_text(comments, 7)
    count, at = _number(comments, at), at + 4
    if count > (len(comments) - at) // 4:
        raise ValueError(f"it claims {count} Vorbis comments")
    for _ in range(count):
        at = _after_text(comments, at)
    if next(packets)[:7] != b"\x05vorbis":
        raise ValueError("it has no Vorbis code books")


def _packets(data: bytes) -> Iterator[bytes]:
    """The packets of an Ogg file's first stream. Raises ValueError: a page is cut, or a packet is too large."""
    packet, at = bytearray(), 0
    while data[at : at + 4] == b"OggS" and len(data) >= at + 27:
        sizes = data[at + 27 : at + 27 + data[at + 26]]
        at += 27 + len(sizes)
        for size in sizes:
            packet += data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("it ends in its Vorbis headers")
            if len(packet) > LARGEST_PACKET:
                raise ValueError(f"a header of over {LARGEST_PACKET:,} bytes")
            if size < 255:
                yield bytes(packet)
                packet.clear()
    raise ValueError("it ends in its Vorbis headers")


def _number(packet: bytes, at: int) -> int:
    if at + 4 > len(packet):
        raise ValueError("its Vorbis comments are cut")
    return int.from_bytes(packet[at : at + 4], "little")


def _after_text(packet: bytes, at: int) -> int:
    """Where the text ends whose length stands at `at`."""
    end = at + 4 + _number(packet, at)
    if end > len(packet):
        raise ValueError("its Vorbis comments are longer than their packet")
    return end


if __name__ == "__main__":
    import miniaudio

    main(miniaudio)
