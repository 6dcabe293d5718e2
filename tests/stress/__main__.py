"""The storm by hand: ``python -m tests.stress --seconds 600 --clients 200`` prints what was seen as JSON.
A soak is ``scripts/days.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.oracle import build_oracle
from tests.stress.run import stress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--kind", choices=("plain", "hybrid"), default="plain", help="the oracle model's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_oracle(Path(folder) / "model", options.kind)
        result = stress(model, Path(folder), options.clients, options.seconds)
    print(result.text())
    return 1 if result.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
