"""A child process for `start_llm.models.inspection` that starts at once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.resource_sharer import DupFd
from typing import IO, Any

from start_llm.models import inspection_child


class Forked:
    """As `subprocess.Popen`, on a child that is forked with everything imported: that takes most of an inspection."""

    processes: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    processes.set_forkserver_preload([inspection_child.__name__])

    def __init__(self, arguments: list[str], output: IO[bytes]) -> None:
        self.process = self.processes.Process(target=_child, args=(DupFd(output.fileno()), arguments))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int:
        return int(self.process.exitcode)

    def wait(self, seconds: float | None = None) -> int:
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("child", seconds or 0.0)
        return self.returncode

    def poll(self) -> int | None:
        exitcode: int | None = self.process.exitcode
        return exitcode

    def kill(self) -> None:
        self.process.kill()


def _child(output: Any, arguments: list[str]) -> None:
    os.dup2(output.detach(), 1)
    sys.argv = ["inspection_child", *arguments]
    inspection_child.main()
