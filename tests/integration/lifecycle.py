"""A user's machine with nothing on it but the oracle: `start-llm` as a program, and what of it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from start_llm.host.ports import free_port, is_free
from start_llm.proxy.child import MODULE
from tests.integration.processes import ROOT, WAIT
from tests.waiting import until

# An agent that runs until its file is there; it says how it was connected.
AGENT = """#!/bin/sh
echo "$0 $START_LLM_KEY $OPENAI_API_BASE"
while [ ! -e "$HOME/$(basename $0).done" ]; do sleep 0.1; done
"""


class Machine:
    """Everything lies in `folder`; `end` ends what was started."""

    def __init__(self, model: Path, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "bin").mkdir()
        for name in ("pi", "aider"):
            path = folder / "bin" / name
            path.write_text(AGENT)
            path.chmod(0o755)
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "START_LLM_HOME": str(folder / "home"),
            "START_LLM_CACHE_DIR": str(folder / "cache"),
            "LOG_ROOT": "logs",
            "MODEL_PATH": str(model),
            "SERVED_MODEL_NAME": "oracle",
            "TRUST_REMOTE_CODE": "true",
            "MLX_PORT": str(self.port),
            "PROXY": "off",
            "REANCHOR": "off",
            **settings,
        }

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "start_llm", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, check=False, timeout=WAIT
        )

    def launch(self, agent: str) -> subprocess.Popen[str]:
        out = (self.folder / f"{agent}.txt").open("w")
        with out:
            return subprocess.Popen(
                self.command("launch", agent), env=self.environment, stdout=out, stderr=out, text=True
            )

    def said(self, agent: str) -> str:
        return (self.folder / f"{agent}.txt").read_text()

    def finish(self, agent: str, process: subprocess.Popen[str]) -> int:
        (self.folder / f"{agent}.done").touch()
        return process.wait(WAIT)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.run("status", "--json").stdout))

    def state(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads((self.run_folder / f"server-{self.port}.json").read_text()))
        except (OSError, ValueError):
            return None

    @property
    def run_folder(self) -> Path:
        return self.folder / "cache" / "run"

    def ours(self) -> dict[str, psutil.Process]:
        """Processes of this machine's server, by what they are: supervisor, engine, proxy."""
        kinds = {"supervise": "supervisor", "serve": "engine", MODULE: "proxy"}
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                kind = next((kinds[word] for word in words if word in kinds), None)
                if kind and process.environ().get("MLX_PORT") == str(self.port):
                    found[kind] = process
            except psutil.Error:
                continue
        return found

    def reach(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Waits until the state is as asked; returns it."""

        def there() -> object:
            state = self.state()
            return state is not None and condition(state)

        until(there)
        return self.state() or {}

    def is_empty(self) -> bool:
        """Nothing of ours is left: no process, no port, no lock, no state."""
        left = [path for path in self.run_folder.iterdir() if path.is_file()] if self.run_folder.exists() else []
        return not self.ours() and is_free("127.0.0.1", self.port) and not left

    def end(self) -> None:
        for process in self.ours().values():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + WAIT
        while self.ours() and time.monotonic() < deadline:
            time.sleep(0.05)
