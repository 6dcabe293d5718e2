"""A soak by hand, ``python -m tests.stress --minutes 61``: how much a server's memory grows from minute 11 on."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.oracle import build_oracle
from tests.stress.run import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=61)
    parser.add_argument("--clients", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        by_minute = soak(build_oracle(Path(folder) / "model", "plain"), Path(folder), options.clients, options.minutes)
    print(by_minute, *(f"{by_minute[-1] / eleventh - 1:+.1%}" for eleventh in by_minute[10:11]))


if __name__ == "__main__":
    main()
