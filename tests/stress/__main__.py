"""The storm by hand: ``python -m tests.stress --seconds 600 --clients 200`` prints what was seen as JSON.

``--minutes 61`` is a soak instead: how much the server's memory grows from the eleventh minute to the last.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.oracle import build_oracle
from tests.stress.run import soak, stress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--kind", choices=("plain", "hybrid"), default="plain", help="the oracle model's")
    parser.add_argument("--minutes", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_oracle(Path(folder) / "model", options.kind)
        if options.minutes:
            by_minute = soak(model, Path(folder), options.clients, options.minutes)
            print(by_minute, f"{by_minute[-1] / by_minute[10] - 1:+.1%}")
            return 0
        result = stress(model, Path(folder), options.clients, options.seconds)
    print(result.text())
    return 1 if result.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
