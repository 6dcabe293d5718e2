"""A process that writes to a disk tier until it is killed, and the check of what it left. Run by test_disk.

usage: disk_writer.py FOLDER KILLS SEED. Forks one writer after another, kills each with SIGKILL at a
random moment, and after each kill reads back everything the index names.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from start_llm.kvcache.blocks import PrefixHash
from start_llm.kvcache.disk.index import TokenRun
from start_llm.kvcache.disk.tier import Buffers, DiskTier

FINGERPRINT = "kill test"
MAX_BYTES = 3_000_000


def content(tokens: np.ndarray) -> Buffers:
    """Rows that follow from their tokens."""
    return {"keys": np.outer(tokens, np.arange(1, 65)).astype(np.float32), "tokens": tokens}


def write_for_ever(folder: Path, seed: int, progress: int) -> None:
    rng = np.random.default_rng(seed)
    tier = DiskTier(folder, FINGERPRINT, MAX_BYTES)
    runs, _ = tier.contents()
    ends = [(run.digest, run.start + len(run.tokens) // 4) for run in runs]
    while True:
        parent, start = (PrefixHash().digest(), 0) if not ends or rng.random() < 0.2 else ends[rng.integers(len(ends))]
        tokens = rng.integers(0, 1000, int(rng.integers(2, 400))).astype(np.int32)
        digest = rng.bytes(32)
        tier.write_run(TokenRun(digest, parent, start, tokens.tobytes(), ""), content(tokens), "run")
        ends.append((digest, start + len(tokens)))
        if rng.random() < 0.5:
            tier.write_checkpoint(digest, content(tokens[:7]), "checkpoint")
        if rng.random() < 0.3:
            tier.split(digest, rng.bytes(32), int(rng.integers(1, len(tokens))))
        if len(ends) % 5 == 0:
            tier.flush()
            os.write(progress, b".")


def check(folder: Path) -> int:
    """Reads back everything. Returns the number of runs."""
    tier = DiskTier(folder, FINGERPRINT, MAX_BYTES)
    assert tier.ready, tier.detail
    runs, checkpoints = tier.contents()
    for run in runs:
        found = tier.read(run.file)
        assert found is not None, f"{run.file} is in the index but cannot be read"
        tokens = np.frombuffer(run.tokens, np.int32)
        part = slice(run.first, run.first + len(tokens))
        assert (found[0]["tokens"][part] == tokens).all()
        assert (found[0]["keys"][part] == content(tokens)["keys"]).all()
    digests = {run.digest for run in runs}
    for digest, name in checkpoints.items():
        assert digest in digests
        found = tier.read(name)
        assert found is not None and (found[0]["keys"] == content(found[0]["tokens"])["keys"]).all()
    stats = tier.stats()
    assert stats["damaged"] == 0
    assert stats["bytes"] <= MAX_BYTES
    tier.close()
    names = {path.name for path in next(folder.iterdir()).iterdir() if path.suffix == ".safetensors"}
    assert names == {run.file for run in runs} | set(checkpoints.values())
    return len(runs)


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
    print(f"{kills} kills, {survived} runs at the end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
