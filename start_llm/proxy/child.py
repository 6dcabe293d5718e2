"""The process that LiteLLM runs in. Nothing of this project is imported here; the launcher starts it by path.

``python -P child.py --start-llm-proxy FD FOLDER -- LITELLM ARGUMENTS``: FD is the read end of a pipe whose write end
only the server holds. When that end closes, however the server ended, this process and all that it started end at
once. FOLDER holds LiteLLM's configuration and that of the gate in front of it, and goes with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

MARKER = "--start-llm-proxy"
COUNTS = Path(__file__).with_name("counts.py")
CARRIED = Path(__file__).with_name("carried.py")
GATE = Path(__file__).with_name("gate.py")
FALLBACK = Path(__file__).with_name("fallback.py")
GATE_CONFIG = "gate.json"
FALLBACK_CONFIG = "fallback.json"


def _end_with(pipe: int, folder: str) -> None:
    """Blocks until the pipe closes, then ends this process's whole group."""
    while os.read(pipe, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _fall_back(app: Any, config: Path) -> None:
    """With FALLBACK_MODEL there is a configuration of it."""
    if not config.exists():
        return
    given = json.loads(config.read_text(encoding="utf-8"))
    fallback = runpy.run_path(str(FALLBACK))
    importlib.import_module("litellm").logging_callback_manager.add_litellm_callback(fallback["Hooks"](given["name"]))
    app.add_middleware(fallback["Fallback"], **given)


def main() -> None:
    marker, pipe, folder, _, *arguments = sys.argv[1:]
    if marker != MARKER:
        raise SystemExit(f"{sys.argv[0]}: the first argument must be {MARKER}, not {marker!r}")
    if os.getpgid(0) != os.getpid():
        raise SystemExit(f"{sys.argv[0]}: must lead its own process group")
    threading.Thread(target=_end_with, args=(int(pipe), folder), name="owner-watch", daemon=True).start()
    sys.argv[1:] = arguments
    counts = runpy.run_path(str(COUNTS))
    gc.disable()  # what these imports make stays: looking for garbage in it is a sixth of the work of a start
    proxy = importlib.import_module("litellm.proxy.proxy_server")
    gc.freeze()
    gc.enable()
    config = json.loads(Path(arguments[arguments.index("--config") + 1]).read_text(encoding="utf-8"))
    counts["count_behind"](proxy.app, config, proxy.user_api_key_auth)
    proxy.app.add_middleware(runpy.run_path(str(CARRIED))["Carried"], behind=counts["names_behind"](config))
    _fall_back(proxy.app, Path(folder) / FALLBACK_CONFIG)
    allowed = json.loads((Path(folder) / GATE_CONFIG).read_text(encoding="utf-8"))
    proxy.app.add_middleware(runpy.run_path(str(GATE))["ProxyGate"], **allowed)  # the last one added is the outermost
    runpy.run_module("litellm.proxy.proxy_cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
