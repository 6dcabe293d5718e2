"""A process that writes to a disk tier until it is killed, and the check of what it left. Run by test_disk.

usage: disk_writer.py FOLDER KILLS SEED. Forks one writer after another, kills each with SIGKILL at a
random moment, and after each kill reads back everything that is found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from start_llm.kvcache.disk.format import StoredPiece
from start_llm.kvcache.disk.tier import Buffers, DiskTier

FINGERPRINT = "kill test"
MAX_BYTES = 3_000_000


def content(tokens: np.ndarray) -> Buffers:
    """Rows that follow from their tokens."""
    return {"keys": np.outer(tokens, np.arange(1, 65)).astype(np.float32), "tokens": tokens}


def write_for_ever(folder: Path, seed: int, progress: int) -> None:
    rng = np.random.default_rng(seed)
    tier = DiskTier(folder, FINGERPRINT, MAX_BYTES)
    ends = [piece for piece in tier.contents() if piece.tokens]
    while True:
        above, start = "", 0
        if ends and rng.random() < 0.8:
            run = ends[rng.integers(len(ends))]
            above, start = run.name, int(rng.integers(run.start + 1, run.end + 1))  # inside it, or at its end
        tokens = rng.integers(0, 1000, int(rng.integers(2, 400))).astype(np.int32)
        piece = StoredPiece(rng.bytes(32), above, start, tokens.tobytes())
        tier.write(piece, content(tokens), "run")
        ends.append(piece)
        if rng.random() < 0.5:
            tier.write(StoredPiece(piece.digest, piece.name, piece.end), content(tokens[:7]), "checkpoint")
        if rng.random() < 0.3:
            tier.touch((ends[rng.integers(len(ends))].name,))
        if len(ends) % 5 == 0:
            tier.flush()
            os.write(progress, b".")


def check(folder: Path) -> int:
    """Reads back everything. Returns the number of files."""
    tier = DiskTier(folder, FINGERPRINT, MAX_BYTES)
    assert tier.ready, tier.detail
    pieces = tier.contents()
    names = {piece.name for piece in pieces}
    for piece in pieces:
        found = tier.read(piece.name)
        assert found is not None, f"{piece.name} was found but cannot be read"
        tokens = np.frombuffer(piece.tokens, np.int32) if piece.tokens else found[0]["tokens"]
        assert (found[0]["tokens"] == tokens).all()
        assert (found[0]["keys"] == content(tokens)["keys"]).all()
        assert not piece.above or piece.above in names
    stats = tier.stats()
    assert stats["damaged"] == 0
    assert stats["bytes"] <= MAX_BYTES
    tier.close()
    assert {path.name for path in next(folder.iterdir()).iterdir()} == names
    return len(pieces)


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    survived = 0
    for number in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(folder, seed * 1000 + number, writing)
        os.read(reading, 1)  # it is writing
        time.sleep(chance.uniform(0, 0.03))  # the random moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        survived = check(folder)
    assert survived > 0
    print(f"{kills} kills, {survived} files at the end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
