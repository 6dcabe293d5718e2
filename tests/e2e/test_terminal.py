"""The typist, on a program that takes its time: with its terminal at the start, and after it gave it back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.world import ROOT

# What has come too early, or as a signal, is its exit code.
SLOW = """
import os, select, signal, sys, termios, time, tty
signal.signal(signal.SIGINT, lambda *_: os._exit(3))
idle = lambda: not select.select([0], [], [], 0.6)[0]
before = termios.tcgetattr(0)
if not idle(): os._exit(4)
tty.setraw(0)
print("\\x1b[?2004h\\x1b[?25lwelcome", end="", flush=True)
if not idle(): os._exit(5)
print("\\x1b[?25h> ", end="", flush=True)
text = b""
while not text.endswith(b"\\x1b[201~"): text += os.read(0, 100)
if not idle(): os._exit(6)
print("\\x1b[1;3H[" + text.decode()[6:11] + "\\x1b[1;9H" + text.decode()[12:17], end="", flush=True)
if os.read(0, 100) != b"\\r": os._exit(7)
open(sys.argv[1], "a").write("one\\n")
if not idle(): os._exit(8)
open(sys.argv[1], "a").write("two\\n")
if os.read(0, 1) != b"\\x03": os._exit(9)
termios.tcsetattr(0, termios.TCSAFLUSH, before)
print("\\x1b[?2004lbye " + text.decode()[6:-6], flush=True)
time.sleep(0.6)
"""
TYPIST = "import sys; import tests.e2e.terminal as t; t.QUIET_SECONDS = 0.1; sys.exit(t.main())"


@pytest.mark.live
@pytest.mark.timeout(60)
def test_keys_wait_for_states(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(tmp_path / "record")]
    (tmp_path / "record").write_text("zero\n")
    run = subprocess.run(
        [sys.executable, "-c", TYPIST, str(tmp_path / "record"), "2", *command],
        input=b"Write it down.\n",
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run
    assert b"bye Write it down." in run.stdout
