"""A program: runs a command in a terminal of its own, and leaves it as a user would once the work is done.

    python terminal.py FILE LINES COMMAND... < PROMPT

Every key waits for a state of the terminal, and for its silence: the prompt is pasted once the command reads keys and
shows a cursor, and sent once it is shown. The work is done when FILE has LINES more lines than at the start; then
Ctrl-C is pressed, but only while it is a key: a command that has given the terminal back is on its way out, and Ctrl-C
would be a signal that makes it fail. Its output goes to standard output, its exit code is this program's. Standard
library only.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from pathlib import Path

QUIET_SECONDS = 2.0
COLUMNS, ROWS = 200, 50
# What a terminal answers when it is asked for its kind, its cursor and its colours.
ANSWERS = {b"\x1b[c": b"\x1b[?62;c", b"\x1b[6n": b"\x1b[1;1R", b"\x1b[?u": b"\x1b[?0u"}
PASTE, PASTE_END = b"\x1b[200~", b"\x1b[201~"
SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P_].*?(?:\x07|\x1b\\)|.)", re.DOTALL)
# Of the prompt's first letters that many in a row are to be seen; a letter that stood there before is not drawn again.
HEAD, ROW = 20, 6


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Terminal:
    """What the command made of its terminal; `drawn` is all that it wrote since the last key."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.drawn = b""
        self.modes = {b"2004": False, b"25": True}  # tells pastes from keys; shows a cursor
        fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def draw(self, text: bytes) -> None:
        self.drawn += text
        for mode in self.modes:
            on, off = (self.drawn.rfind(b"\x1b[?" + mode + end) for end in (b"h", b"l"))
            if on != off:
                self.modes[mode] = on > off

    def press(self, keys: bytes) -> None:
        self.drawn = b""
        os.write(self.handle, keys)

    def reads_keys(self) -> bool:
        """Keys come to the command one by one, and Ctrl-C is one of them."""
        return not termios.tcgetattr(self.handle)[3] & (termios.ICANON | termios.ISIG)

    def waits(self) -> bool:
        """There is a place to write."""
        return self.reads_keys() and all(self.modes.values())

    def shows(self, prompt: bytes) -> bool:
        """The head of `prompt` was drawn since the last key."""
        head = b"".join(prompt[:HEAD].split())
        drawn = b"".join(SEQUENCE.sub(b"", self.drawn).split())
        return any(head[at : at + ROW] in drawn for at in range(max(1, len(head) - ROW + 1)))


def main() -> int:
    record, wanted, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    before, prompt = lines(record), sys.stdin.buffer.read()
    pid, handle = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    terminal = Terminal(handle)
    steps = [
        (terminal.waits, PASTE + prompt + PASTE_END),
        (lambda: terminal.shows(prompt), b"\r"),
        (lambda: lines(record) - before >= wanted and terminal.reads_keys(), b"\x03"),
    ]
    while True:
        ready, _, _ = select.select([handle], [], [], QUIET_SECONDS)
        if not ready:
            state, keys = steps[0]
            if state():
                terminal.press(keys)
                steps = steps[1:] or steps  # Ctrl-C, as often as it is taken
            continue
        try:
            text = os.read(handle, 65536)
        except OSError:  # Linux: the other end is closed
            text = b""
        if not text:
            break
        os.write(sys.stdout.fileno(), text)
        terminal.draw(text)
        for question, answer in ANSWERS.items():
            if question in text:
                os.write(handle, answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
