"""Records what `start-llm demo` prints in a terminal as a picture for the documentation.

    python3.12 install_and_run.py run scripts/recording.py

runs it in a pseudo-terminal, with the embedded model, and writes ``docs/images/demo.svg``. Nothing is made up: the
text is the run's own.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "demo.svg"
COLUMNS = 112
SECONDS = 600
# Text that a terminal shows only until the next one takes its place, on the same line.
_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
_KEY = re.compile(r"sk-\w+")  # the key of a proxy that has ended
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def record(command: list[str]) -> str:
    """What `command` prints on a terminal, with its colours.

    Raises:
        CalledProcessError: it failed.
    """
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=environment) as run:
        os.close(follower)
        output = b""
        while chunk := _read(leader):
            output += chunk
        os.close(leader)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command, output)
    return output.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # Linux says so when the last program has closed its end
        return b""


def draw(shown: str, output: str) -> str:
    """An SVG of a terminal in which `shown` was typed and `output` came. It fetches no font."""
    console = Console(width=COLUMNS, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(f"$ {shown}"))
    for line in _KEY.sub("sk-...", _OVERWRITTEN.sub("", output.replace("\r\n", "\n"))).splitlines():
        console.print(Text.from_ansi(line))
    drawing = console.export_svg(title="start_llm", theme=MONOKAI, unique_id="demo")
    return _FONT.sub("", drawing)


def main() -> None:
    output = record([sys.executable, "-m", "start_llm", "demo"])
    PICTURE.write_text(draw("start-llm demo", output), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
