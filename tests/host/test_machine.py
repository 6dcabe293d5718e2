"""The machine: its ports, processes and folders, its BLAS, what a Mac says of itself, and that it does not sleep."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from start_llm.host import blas
from start_llm.host import home as homes
from start_llm.host.awake import BEHIND_SECONDS, Awake, holder
from start_llm.host.home import ANEW_VARIABLE
from start_llm.host.mac import MacFacts, read_mac, remarks
from start_llm.host.ports import address, free_port, is_free, listener, who_listens
from start_llm.host.processes import created, running, wait_until
from tests.waiting import until


def test_a_clone_is_its_own_home_and_an_installed_package_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("START_LLM_HOME", raising=False)
    assert (homes.home() / "install_and_run.py").is_file()
    monkeypatch.setattr(homes, "SOURCES", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert homes.home() == tmp_path / ".start_llm"
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "other"))
    assert homes.made_home() == tmp_path / "other" and (tmp_path / "other").stat().st_mode & 0o777 == 0o700


def test_a_taken_port_is_known_with_its_holder() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        found = listener(port)
        assert not is_free("127.0.0.1", port) and found is not None and found.pid == os.getpid()
        assert f"process {os.getpid()} (" in who_listens(port)
    assert is_free("127.0.0.1", port) and listener(port) is None
    assert "cannot be seen" in who_listens(port)


def test_a_free_port_stays_free_until_it_is_used() -> None:
    """Other programs that ask the system for any port must not get it."""
    ports = [free_port() for _ in range(20)]
    assert all(is_free("127.0.0.1", port) for port in ports) and len(set(ports)) > 15
    assert max(ports) < 32_768, "Linux gives from there on"
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


def test_addresses() -> None:
    assert address("0.0.0.0", 1) == "http://127.0.0.1:1" and address("::1", 2) == "http://[::1]:2"
    assert address("::", 3) == "http://[::1]:3" and address("mac.local", 4) == "http://mac.local:4"


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    assert running(os.getpid(), created(os.getpid())) == psutil.Process()
    assert running(os.getpid(), 1.0) is None and running(2**22 - 1, created(2**22 - 1)) is None


def test_it_waits_until_something_is_done_and_not_for_ever() -> None:
    looks = iter([False, False, True])
    assert wait_until(lambda: next(looks), 60) and not wait_until(lambda: False, 0)


GIB = 2**30
PMSET = "System-wide power settings:\nCurrently in use:\n standby              1\n lowpowermode         1\n"


def stand_in(command: Sequence[str]) -> str:
    return {"pmset -g": PMSET, "sysctl -n iogpu.wired_limit_mb": "20480\n"}[" ".join(command)]


def test_what_the_commands_say_is_read() -> None:
    found = read_mac(stand_in, "26.1")
    assert found == MacFacts("26.1", True, 20480, found.mlx_wheel) and "Tag: " in found.mlx_wheel
    assert read_mac(lambda command: "", "15.0") == MacFacts("15.0", None, None, found.mlx_wheel)
    assert read_mac(lambda command: PMSET.replace("1\n", "0\n"), "15.0").low_power is False


def test_each_remark_has_its_remedy() -> None:
    said = remarks(MacFacts("15.0", True, 0, "macosx_15_0"), "Apple M5", 16 * GIB, 20 * GIB)
    poor = [text for well, text in said if not well]
    assert len(poor) == 3
    assert "Low Power Mode: Never" in poor[0] and "iogpu.wired_limit_mb=21504" in poor[1] and "macOS 26" in poor[2]
    good = list(remarks(MacFacts("26.1", False, 20480, "macosx_26_0_arm64"), "Apple M5 Max", 20 * GIB, 5 * GIB))
    assert all(well for well, _ in good) and "iogpu.wired_limit_mb=20480" in good[1][1]
    assert len(list(remarks(MacFacts("26.1", False, 0), "Apple M4", 20 * GIB))) == 2
    assert [line for _, line in remarks(MacFacts("26.1", False, 0), "Apple M4")] == ["macOS 26.1"]
    assert "21.5 GB" in list(remarks(MacFacts("26.1", False, 20480), "Apple M4"))[1][1]


def test_the_systems_commands_end_with_the_server() -> None:
    assert holder("darwin", 7) == ["caffeinate", "-i", "-w", "7"]
    linux = holder("linux", 7)
    assert linux[0] == "systemd-inhibit" and "--what=sleep:idle" in linux and "--pid=7" in linux
    assert holder("other", 7) == []


@pytest.mark.live
def test_it_holds_while_there_is_work_and_lets_go_behind_it() -> None:
    idle, low = [0.0], [False]
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    awake = Awake(lambda: idle[0], command, lambda: low[0])
    assert awake.look() and awake.look()
    first = awake._child
    assert first is not None and first.poll() is None
    idle[0] = BEHIND_SECONDS + 1
    assert awake.look() and awake._child is None and first.poll() is not None
    idle[0] = 0.0
    assert awake.look() and awake._child is not None
    low[0] = True  # the battery
    assert awake.look() and awake._child is None


@pytest.mark.live
def test_a_command_that_ends_or_is_not_there_is_not_tried_for_ever() -> None:
    ending = Awake(lambda: 0.0, [sys.executable, "-c", "raise SystemExit(3)"], lambda: False)
    assert ending.look()
    until(lambda: ending._child is not None and ending._child.poll() is not None)
    assert not ending.look()
    assert not Awake(lambda: 0.0, ["/nothing/there"], lambda: False).look()


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have a fast BLAS of their own")


@pytest.mark.live
@linux_only
def test_a_process_begins_again_once_with_the_same_words(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from start_llm.host import blas\n"
        "blas.known = lambda prefix: 'libm.so.6'\n"
        "print(os.getpid(), os.getcwd(), sys.argv[1:], os.environ.get('LD_PRELOAD'), flush=True)\n"
        "folder = os.getcwd(); os.chdir('/'); blas.begin_again(folder); print('done')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in {"LD_PRELOAD", ANEW_VARIABLE}}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code, "two words"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    before, after, done = run.stdout.splitlines()
    assert before.endswith("['two words'] None") and done == "done"
    assert after == before.replace("None", "libm.so.6"), "the same process, folder and words"


def test_what_is_known_is_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    answers = iter([None, "libopenblas.so.0", str(tmp_path / "bridge.so"), None])
    compiler: list[str | None] = [None]

    def bridge(prefix: Path) -> str | None:
        asked.append(prefix)
        return next(answers)

    monkeypatch.setattr(blas, "bridge", bridge)
    monkeypatch.setattr(blas, "_compiler", lambda: compiler[0])
    (tmp_path / "lib").mkdir()
    assert [blas.known(tmp_path), blas.known(tmp_path)] == [None, None] and len(asked) == 1
    compiler[0] = "/usr/bin/cc"  # installed meanwhile
    assert [blas.known(tmp_path), blas.known(tmp_path)] == ["libopenblas.so.0"] * 2 and len(asked) == 2
    compiler[0] = "/usr/bin/gcc"
    assert blas.known(tmp_path) == str(tmp_path / "bridge.so")
    assert blas.known(tmp_path) is None and len(asked) == 4, "that file is gone"
    (tmp_path / blas.NOTE).write_text("[]")
    with pytest.raises(StopIteration):
        blas.known(tmp_path)
