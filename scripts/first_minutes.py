"""Types README's first commands on a machine that has nothing yet, and measures when each first says something.

    python scripts/first_minutes.py [--wheel] [--agent pi] [--folder FOLDER]

A home and caches that are empty, a clone of this repository (or its wheel, installed by ``uv tool`` and used outside of
a clone), and an agent that is already on PATH. Packages come from the network. Each command runs in a terminal of its
own; what counts is the time until its first visible character, and the time until it ends. Fails if one of them is
later than `--limit`, or ends with an error.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP_SECONDS = 900.0
UNSEEN = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\s")


@dataclass(frozen=True)
class Said:
    """How one command went; times in seconds."""

    command: str
    first: float
    total: float
    code: int
    text: str


def in_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> Said:
    """Runs a command in a new terminal; one that takes longer than STEP_SECONDS is ended."""
    started = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    text, first = b"", 0.0
    while time.monotonic() - started < STEP_SECONDS:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux: the command has ended
            break
        if not piece:
            break
        text += piece
        if not first and UNSEEN.sub(b"", text):
            first = time.monotonic() - started
    else:
        os.kill(pid, 15)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    total = time.monotonic() - started
    return Said(" ".join(command), first or total, total, code, text.decode(errors="replace"))


def fresh_environment(home: Path, agent: str) -> dict[str, str]:
    """This process's variables without what points at what is here already."""
    path = [str(home / ".local" / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    if found := shutil.which(agent):
        path.insert(1, str(Path(found).parent))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("START_LLM", "XDG_", "UV_CACHE", "UV_TOOL", "VIRTUAL_ENV", "PYTHON", "LD_PRELOAD"))
    }
    return kept | {"HOME": str(home), "PATH": os.pathsep.join(path), "TERM": "xterm-256color"}


def day_one(program: list[str], agent: str) -> list[list[str]]:
    """README's commands behind the installation, in its order."""
    return [
        [*program, "recommend"],
        [*program, "start"],
        [*program, "launch", agent, "--", "-p", "Say hello."],
        [*program, "status"],
        [*program, "ps"],
        [*program, "models"],
        [*program, "audit"],
        [*program, "chat", "Say hello."],
        [*program, "doctor"],
        [*program, "stop"],
        [*program, "demo"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", action="store_true", help="install a wheel outside of a clone")
    parser.add_argument("--agent", default="pi", help="on PATH, takes -p (pi)")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds until the first character (1)")
    parser.add_argument("--folder", type=Path, help="an empty folder to work in; it is kept")
    options = parser.parse_args()
    work = options.folder or Path(tempfile.mkdtemp(prefix="first-minutes-"))
    home, project = work / "home", work / "project"
    for folder in (home, project):
        folder.mkdir(parents=True)
    environment = fresh_environment(home, options.agent)
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    if options.wheel:
        uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or "uv"
        subprocess.run([uv, "build", "-q", "--wheel", "-o", str(work / "dist"), str(ROOT)], check=True)
        (wheel,) = (work / "dist").glob("*.whl")
        python = ["--python", sys.executable]
        install = [uv, "tool", "install", *python, str(wheel), "-c", str(ROOT / "constraints.txt")]
        steps = [install, *day_one(["start-llm"], options.agent)]
    else:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(work / "clone")], check=True)
        steps = day_one([sys.executable, str(work / "clone" / "install_and_run.py")], options.agent)
    done: list[Said] = []
    try:
        for step in steps:
            done.append(in_terminal(step, project, environment))
            said = done[-1]
            print(f"{said.first:7.2f} s first  {said.total:7.1f} s all  exit {said.code}  {said.command}", flush=True)
            if said.code != 0:
                print(said.text)
    finally:
        in_terminal([*steps[-1][:-1], "stop", "--all"], project, environment)
        if options.folder is None:
            shutil.rmtree(work, ignore_errors=True)
    answered = sum(said.total for said in done[: 4 if options.wheel else 3])
    print(f"until the agent has answered: {answered:.0f} s; slowest first character {max(s.first for s in done):.2f} s")
    return int(any(said.code != 0 or said.first > options.limit for said in done))


if __name__ == "__main__":
    sys.exit(main())
