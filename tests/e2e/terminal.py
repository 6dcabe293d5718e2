"""A program: runs a command in a terminal of its own, and leaves it as a user would once the work is done.

    python terminal.py FILE LINES COMMAND... < PROMPT

Once the command waits (its terminal is quiet), the prompt is pasted and sent. The work is done when FILE has LINES more
lines than at the start and the terminal is quiet again; then Ctrl-C is pressed until the command ends. Its output goes
to standard output, its exit code is this program's. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
from pathlib import Path

QUIET_SECONDS = 2.0
COLUMNS, ROWS = 200, 50
# What a terminal answers when it is asked for its kind, its cursor and its colours.
ANSWERS = {b"\x1b[c": b"\x1b[?62;c", b"\x1b[6n": b"\x1b[1;1R", b"\x1b[?u": b"\x1b[?0u"}


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    record, wanted, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    before = lines(record)
    # In pieces, each given when the one before has been taken.
    typed = [b"\x1b[200~" + sys.stdin.buffer.read() + b"\x1b[201~", b"\r"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while True:
        ready, _, _ = select.select([terminal], [], [], QUIET_SECONDS)
        if not ready:
            if typed:
                os.write(terminal, typed.pop(0))
            elif lines(record) - before >= wanted:
                os.write(terminal, b"\x03")
            continue
        try:
            text = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            text = b""
        if not text:
            break
        os.write(sys.stdout.fileno(), text)
        for question, answer in ANSWERS.items():
            if question in text:
                os.write(terminal, answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
