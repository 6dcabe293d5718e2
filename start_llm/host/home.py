"""Where the user's own files of this program lie, and what the program is called on the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from start_llm.core.extras import SOURCES
from start_llm.core.paths import expanded

COMMAND_VARIABLE = "START_LLM_COMMAND"
ANEW_VARIABLE = "START_LLM_BLAS_TRIED"
"""Set in a process that `host/blas` has started anew: it has said its first line already."""
NAME = "start-llm"
BEGIN = (
    ("recommend", "models for this machine"),
    ("start NAME", "fetch and serve one of them; without a name a small one, to look around"),
    ("launch pi", "a coding agent in this folder, connected to it"),
)
"""The first commands of a new user."""


def home() -> Path:
    """The folder of `.env` and of relative paths in the settings (LOG_ROOT).

    START_LLM_HOME, else the clone that this runs from, else ``~/.start_llm``. It need not exist yet.
    """
    given = os.environ.get("START_LLM_HOME")
    if given:
        return expanded(given).absolute()
    return SOURCES if (SOURCES / "install_and_run.py").is_file() else Path("~/.start_llm").expanduser()


def made_home() -> Path:
    """`home`, made if it is not there yet. Raises OSError."""
    folder = home()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def command() -> str:
    """The words that the user types before a command's name. `install_and_run.py` says so if it is the one."""
    return os.environ.get(COMMAND_VARIABLE) or NAME


def python_path() -> str:
    """PYTHONPATH for a child process that runs this package from another folder."""
    return os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])


def module_command(*arguments: str) -> list[str]:
    """The command line that runs this package in a child process."""
    return [sys.executable, "-m", "start_llm", *arguments]
