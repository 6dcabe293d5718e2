"""The process that LiteLLM runs in: ``python -P -m start_llm.proxy.child FD FOLDER -- LITELLM ARGUMENTS``.

FD is the read end of a pipe whose write end only the server holds. When that end closes, however the server ended, this
process and all that it started end at once. FOLDER holds LiteLLM's configuration and that of the layers around it, and
goes with it. This module imports no LiteLLM: the pipe is watched before that begins.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

MODULE = "start_llm.proxy.child"


def main() -> None:
    """Runs LiteLLM in this process until the owner's end of the pipe closes."""
    pipe, folder, _dashes, *arguments = sys.argv[1:]
    if os.getpgid(0) != os.getpid():
        raise SystemExit(f"{MODULE}: must lead its own process group")
    threading.Thread(target=_end_with, args=(int(pipe), folder), name="owner-watch", daemon=True).start()
    gc.disable()  # what these imports make stays: looking for garbage in it is a sixth of the work of a start
    application = importlib.import_module("start_llm.proxy.application")
    gc.freeze()
    gc.enable()
    application.run(Path(folder), arguments)


def _end_with(pipe: int, folder: str) -> None:
    """Blocks until the pipe closes, then ends this process's whole group."""
    while os.read(pipe, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
