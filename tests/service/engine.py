"""An engine that does what a file says, a line for each start. Run by its path; standard library only, so it is quick.

Lines: ``exit CODE`` (before it is ready), ``ready`` (until it is asked to end), ``ready CODE`` (then it ends by
itself), ``deaf`` (ready, and does not obey).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def engine(script: Path) -> int:
    lines = script.read_text().splitlines()
    script.write_text("\n".join(lines[1:]))
    word, _, code = (lines[0] if lines else "ready").partition(" ")
    print(f"engine: {word} {code}", file=sys.stderr, flush=True)
    with (script.parent / "starts").open("a") as file:
        file.write(f"{os.getpid()} {time.monotonic()}\n")
    if word == "exit":
        return int(code)
    print(json.dumps({"event": "ready", "url": "http://x", "proxy_url": None, "model": "fake"}), flush=True)
    if code:
        return int(code)
    if word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    sys.stdin.readline()
    return 0


if __name__ == "__main__":
    sys.exit(engine(Path(sys.argv[1])))
