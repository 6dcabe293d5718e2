"""Files to samples, against mlx-audio's own reader. Those that were made to harm the server are refused with 400, and
cost a child process at most."""

from __future__ import annotations

import gc
import io
import random
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from start_llm.audio.decoder import Decoder, NotDecoded
from start_llm.audio.decoder_child import MEMORY, SECONDS
from start_llm.audio.samples import RATE, look_at, samples_of
from start_llm.core.errors import BadRequest
from tests.audio.tiny import encoded, tone, wav
from tests.waiting import until

pytestmark = pytest.mark.live

FEW, MANY = 100, 5_000
"""Files of each format, by default and with --slow."""
INTERESTING = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFE, 0xFF)


def real_file(kind: str) -> bytes:
    return wav(tone(0.25)) if kind == "WAV" else encoded(kind, 16000, seconds=0.25)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with up to eight changes, most of them in its headers."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        end = max(1, len(changed) if chance.random() < 0.3 else min(len(changed), chance.choice((64, 300, 4000))))
        at = chance.randrange(end)
        match chance.randrange(6):
            case 0:
                changed[at : at + 1] = bytes((chance.choice(INTERESTING),))
            case 1:
                changed[at : at + 1] = bytes((chance.randrange(256),))
            case 2:
                changed[at : at + 4] = struct.pack("<I", chance.choice((0, 1, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)))
            case 3:
                del changed[at : at + chance.randrange(1, 64)]
            case 4:
                other = chance.randrange(len(data))
                changed[at:at] = data[other : other + chance.randrange(1, 200)]
            case _:
                del changed[max(48, at) :]
    if chance.random() < 0.5:
        _mend_pages(changed)
    return bytes(changed)


def _mend_pages(data: bytearray) -> None:
    """Right checksums for the pages of an Ogg file: a reader that looks at them goes on to what was changed."""
    at = 0
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        sizes = data[at + 27 : at + 27 + data[at + 26]]
        end = at + 27 + len(sizes) + sum(sizes)
        data[at + 22 : at + 26] = bytes(4)
        crc = 0
        for byte in data[at:end]:
            crc ^= byte << 24
            for _ in range(8):
                crc = (crc << 1) ^ (0x104C11DB7 if crc & 0x80000000 else 0)
        data[at + 22 : at + 26] = struct.pack("<I", crc & 0xFFFFFFFF)
        at = end


@pytest.fixture
def files(request: pytest.FixtureRequest) -> int:
    return MANY if request.config.getoption("--slow") else FEW


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3", "OGG"])
def test_no_changed_file_does_more_than_be_refused(kind: str, files: int) -> None:
    chance, original = random.Random(f"recordings as {kind}"), real_file(kind)
    us = psutil.Process()
    look_at(original, "file")
    gc.collect()
    before = us.memory_info().rss
    outcomes: Counter[str] = Counter()
    for number in range(files):
        data = mutated(original, chance)
        try:
            recording = look_at(data, "file")
            if recording.seconds <= 60:  # longer ones wait for room, as `AudioService` has it
                assert np.abs(samples_of(recording, "file")).max() <= 2.0
            outcomes["heard"] += 1
        except BadRequest as refused:
            assert refused.param == "file", (number, data)
            assert refused.message.startswith("file: "), (number, data)
            outcomes["ended its decoder" if "its decoder" in refused.message else "refused"] += 1
    gc.collect()
    assert us.memory_info().rss - before < 100 << 20, outcomes
    assert outcomes["heard"] and outcomes["refused"]
    assert len(samples_of(look_at(original, "file"), "file"))


def test_files_that_claim_what_they_do_not_hold_are_refused() -> None:
    page = b"OggS" + bytes((0, 2)) + bytes(20)
    first = b"\x01vorbis" + struct.pack("<IBIiiiBB", 0, 1, 16000, 0, 0, 0, 0xB8, 1)
    claims = b"\x03vorbis" + struct.pack("<II", 0, 0x0FFFFFFF)
    flac = bytearray(real_file("FLAC"))
    flac[18:21] = bytes((0, 0, flac[20] & 0x0F))
    many = page + bytes((2, len(first), len(claims))) + first + claims
    for data in (many, real_file("OGG")[:502], bytes(flac)):
        with pytest.raises(BadRequest, match="file: "):
            look_at(data, "file")


@pytest.fixture
def child_decoder() -> Iterator[Decoder]:
    made = Decoder()
    yield made
    made.close_child()


def is_whole(of: Decoder, data: bytes) -> bool:
    """Whether each sample of this WAV file is decoded."""
    samples = np.frombuffer(b"".join(of.decode(data)), np.float32)
    return bool((samples * 32768 == np.frombuffer(data[44:], "<i2")).all())


def the_child(of: Decoder) -> psutil.Process:
    (found,) = (child for child in psutil.Process().children() if child.pid == getattr(of._child, "pid", None))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process's limits")
def test_the_child_has_limits_for_each_file(child_decoder: Decoder) -> None:
    small, large = wav(tone(0.25)), wav(tone(60.0))
    child_decoder.look(small)
    child = the_child(child_decoder)
    of_small, _ = child.rlimit(psutil.RLIMIT_AS)
    child_decoder.look(large)
    of_large, _ = child.rlimit(psutil.RLIMIT_AS)
    assert of_large - of_small == 2 * (len(large) - len(small))
    assert MEMORY < of_small < 2 * MEMORY + (256 << 20)
    assert SECONDS <= child.rlimit(psutil.RLIMIT_CPU)[0] <= SECONDS + 20
    assert child.rlimit(psutil.RLIMIT_CORE) == (0, 0)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGXCPU, f"over {SECONDS} seconds of a processor"), (signal.SIGSEGV, "ended with code -11")],
)
def test_a_file_that_ends_the_child_is_the_only_one_that_suffers(
    child_decoder: Decoder, number: signal.Signals, said: str
) -> None:
    data = wav(tone(30.0))
    parts = child_decoder.decode(data)
    next(parts)
    the_child(child_decoder).send_signal(number)
    with pytest.raises(NotDecoded, match=said):
        list(parts)
    assert is_whole(child_decoder, data)


def test_who_gives_up_in_the_middle_harms_nobody_after(child_decoder: Decoder) -> None:
    data = wav(tone(30.0))
    parts = child_decoder.decode(data)
    next(parts)
    parts.close()
    assert is_whole(child_decoder, data)


def test_the_child_ends_with_the_server() -> None:
    code = (
        "import sys, time; from start_llm.audio.decoder import Decoder; from tests.audio.tiny import tone, wav\n"
        "one = Decoder(); one.look(wav(tone(0.25))); print(one._child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("kind", ["wav", "FLAC"])
def test_samples_are_those_of_mlx_audio(kind: str, rate: int) -> None:
    from mlx_audio.audio_io import read

    data = wav(tone(1.5, rate=rate), rate, channels=2) if kind == "wav" else encoded(kind, rate)
    recording = look_at(data, "file")
    assert abs(recording.seconds - 1.5) < 0.1
    theirs, _ = read(io.BytesIO(data), dtype="float32", sample_rate=RATE, nchannels=1)
    ours = samples_of(recording, "file")
    assert ours.dtype == np.float32
    assert abs(len(ours) - len(theirs)) <= 1
    size = min(len(ours), len(theirs))
    assert np.abs(ours[:size] - theirs[:size]).max() < 1e-4


@pytest.mark.parametrize(("kind", "subtype"), [("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_what_is_packed_with_loss_is_read_without_another_program(kind: str, subtype: str | None) -> None:
    heard = samples_of(look_at(encoded(kind, 16000, subtype), "file"), "file")
    first = tone(1.5)
    assert abs(len(heard) - len(first)) < 0.1 * RATE
    size = min(len(heard), len(first))
    assert np.corrcoef(heard[:size], first[:size])[0, 1] > 0.95


def test_a_file_that_is_shorter_than_its_header_says_is_read_to_its_end() -> None:
    heard = samples_of(look_at(wav(tone(2.0))[: 44 + RATE], "file"), "file")
    assert abs(len(heard) - RATE / 2) < 10


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"hello, this is text", "this is no WAV, FLAC, MP3 or Ogg"),
        (b"#EXTM3U\nfile:///etc/passwd", "this is no WAV"),
        (b"\x00\x00\x00\x20ftypM4A ", "this is no WAV"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "cannot be decoded"),
        (b"RIFF" + b"\xff" * 4 + b"WAVE" + b"\xff" * 400, "cannot be decoded"),
        (b"fLaC" + bytes(200), "cannot be decoded"),
        (b"OggS" + bytes(200), "cannot be decoded"),
        (b"ID3" + bytes(500), "file: "),
        (wav(tone(0.1))[:44], "no samples"),
        (wav(tone(0.1, rate=12345), 12345), "12345 samples a second; allowed are 8000, 11025"),
        (wav(np.zeros(0, np.float32)), "no samples"),
    ],
)
def test_what_is_no_recording_is_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        samples_of(look_at(data, "file"), "file")
    assert refused.value.param == "file"
