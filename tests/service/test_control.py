"""The server's place on this machine, what is said of its start, units of systemd and launchd (neither runs here)."""

from __future__ import annotations

import argparse
import configparser
import contextlib
import os
import plistlib
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from start_llm.core.errors import Explained
from start_llm.core.settings import Settings, load_settings
from start_llm.host.mac import MacFacts
from start_llm.host.processes import created
from start_llm.models.device import GIB, Device
from start_llm.models.servers import running_ports
from start_llm.service import commands, control, units
from start_llm.service.place import Exit, Place, ServerState, end_when_unused, port_of_one
from start_llm.service.units import LABEL, ServiceUnit, unit_for


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(None, start_llm_cache_dir=tmp_path, log_root=tmp_path, mlx_port=1)


def test_who_interrupts_a_start_is_told_that_it_goes_on(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "is_free", lambda *_: True)
    monkeypatch.setattr(control, "spawn", lambda *_: SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(control, "_answers_before", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        control.bring_up(settings, Place(settings), {}, said.append)
    assert said[-1].startswith("the server goes on starting; ") and said[-1].endswith(" stop --port 1` ends it")


def test_what_is_added_to_a_log_is_passed_on_with_its_indentation(tmp_path: Path) -> None:
    """`logs -f` shows tracebacks by it. Of a bar that is drawn again and again, the last state."""
    log = tmp_path / "log"
    log.write_bytes(b"told before\n")
    said: list[str] = []
    follower = control.Follower(log, said.append, log.stat().st_size)
    with log.open("ab") as file:
        file.write(b'Traceback:\n  File "a.py", line 1\n    x\n\n10%\r20%\n  ends with CR LF\r\nhal')
    follower.look()
    with log.open("ab") as file:
        file.write(b"f\n")
    follower.look()
    assert said == ["Traceback:", '  File "a.py", line 1', "    x", "20%", "  ends with CR LF", "half"]


def test_a_log_is_shown_without_what_a_terminal_obeys(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LiteLLM quotes names that clients send, and transformers what stands in a model's files."""
    log = tmp_path / "proxy.log"
    log.write_text("no model \x1b]52;c;QQ==\x07\x9b1mx\n")

    def comes(_: float) -> None:
        if log.read_text().count("\n") > 1:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write("a bar \x1b[2J\r\rnor \x1bc this\n")

    monkeypatch.setattr(commands.time, "sleep", comes)
    with pytest.raises(KeyboardInterrupt):
        commands.main_logs(settings, argparse.Namespace(proxy_log=True, lines=5, follow=True))
    assert capsys.readouterr().out == "no model ]52;c;QQ==1mx\nnor c this\n"


def test_status_shows_what_a_server_says_without_what_a_terminal_obeys(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health = {"state": "busy", "detail": "loading \x1b[2J\x9b1mx"}
    monkeypatch.setattr(commands, "ask_json", lambda *_, **__: (200, health))
    monkeypatch.setattr(commands, "model_cards", lambda *_: [{"id": "a\x1b]0;b\x07", "context_length": 8}])
    assert commands.main_status(settings, argparse.Namespace(json=False)) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["model", "a]0;b  (context 8 tokens)"] in lines and ["now", "loading [2J1mx"] in lines


def test_ps_shows_each_model_that_is_loaded(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = [
        {"id": name, "details": {"state": state, "weight_bytes": size, "kv_bytes": 83 * 10**6}}
        for name, state, size in (("main", "ready", 540), ("off", "stored", 1), ("bad", "failed", 1))
    ]
    cards.append({"id": "second", "details": {"state": "loading", "weight_bytes": 7.1e9}})
    monkeypatch.setattr(commands, "ask_json", lambda *_, **__: (200, {"state": "ready", "running": 2}))
    monkeypatch.setattr(commands, "model_cards", lambda *_: cards)
    monkeypatch.setattr(commands, "running_ports", lambda _: [8081])
    assert commands.main_ps(settings, argparse.Namespace(json=False)) == 0
    _, main, second = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main == ["8081", "main", "ready", "540", "B", "83.0", "MB", "2", "0", "0", "0", "B", "0", "s"]
    assert second == ["second", "loading", "7.1", "GB", "0", "B"]


def test_status_tells_of_the_machine_and_what_to_do(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path))
    settings = load_settings(None, start_llm_cache_dir=tmp_path / "not yet", mlx_port=1)
    monkeypatch.setattr(commands, "ask_json", lambda *_, **__: (200, {"state": "ready"}))
    monkeypatch.setattr(commands, "model_cards", lambda *_: [])
    assert commands.main_status(settings, argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"settings     {tmp_path / '.env'} (not there yet)"
    (line,) = [line for line in lines if line.startswith("machine ")]
    assert " GB of memory and " in line and line.endswith("B of disk are free")

    mac = Device("macOS", "Apple M5 Max", 128 * GIB, "metal", 96 * GIB)
    monkeypatch.setattr(commands, "inspect_device", lambda _: mac)
    monkeypatch.setattr(commands, "read_mac", lambda: MacFacts("26.1", True, 98304, "macosx_15_0"))
    monkeypatch.setattr(commands, "free_disk", lambda folder: (folder, GIB))
    known = commands.machine(settings)
    assert known["machine"].startswith(
        "Apple M5 Max, macOS 26.1, the GPU may use 103.1 GB (iogpu.wired_limit_mb=98304); "
    )
    power, kernels, disk = known["notes"]
    assert "low power mode is on" in power and "neural accelerators" in kernels and "KV_DISK_DIR" in disk


HOLD = """
import sys; from pathlib import Path; from start_llm.core.settings import load_settings
from start_llm.service.place import Place
with Place(load_settings(None, start_llm_cache_dir=Path(sys.argv[1])), 7).used():
    print("used", flush=True); sys.stdin.read()
"""


def settings_in(folder: Path) -> Settings:
    return load_settings(None, start_llm_cache_dir=folder, mlx_port=7)


def test_a_state_is_read_as_it_was_written_and_is_its_owners_only(tmp_path: Path) -> None:
    place = Place(settings_in(tmp_path))
    assert place.read() is None and not place.is_running
    state = ServerState(1, 2.0, flags={"mlx_port": "7"}, last_exit=Exit(70, 3.0, "words"))
    place.write(state)
    assert place.read() == state
    (path,) = (tmp_path / "run").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    for text in ("", "[]", '{"pid": 7}', "nonsense"):
        path.write_text(text)
        assert place.read() is None
    place.forget()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_state_of_a_newer_version_is_read(tmp_path: Path) -> None:
    place = Place(settings_in(tmp_path))
    place.write(ServerState(1, 2.0))
    path = tmp_path / "run" / "server-7.json"
    path.write_text(path.read_text().replace("{", '{"invented": 1,', 1))
    assert place.read() is not None


def test_only_locked_ports_run(tmp_path: Path) -> None:
    place = Place(settings_in(tmp_path))
    assert running_ports(settings_in(tmp_path)) == []
    assert place.lock.take()
    (tmp_path / "run" / "server-9.lock").touch()
    assert running_ports(settings_in(tmp_path)) == [7]
    place.lock.drop()


def test_of_several_servers_none_is_guessed(tmp_path: Path) -> None:
    ours = settings_in(tmp_path)
    places = [Place(ours, port) for port in (8, 9)]
    with contextlib.ExitStack() as stack:
        for place in places:
            assert place.lock.take()
            stack.callback(place.lock.drop)
            if place.port == 8:
                assert port_of_one(ours, {}, must_be_one=True) == 8
        with pytest.raises(Explained, match="ports 8, 9: name one, as in --port 8"):
            port_of_one(ours, {}, must_be_one=True)
        assert port_of_one(ours, {}, must_be_one=False) == ours.mlx_port
        assert port_of_one(ours, {"mlx_port": "7"}, must_be_one=True) == ours.mlx_port


@pytest.mark.live
def test_users_are_counted_until_they_end_however_they_end(tmp_path: Path) -> None:
    place = Place(settings_in(tmp_path))
    assert place.users() == 0
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"used\n"
    with place.used():
        assert place.users() == 2
    assert place.users() == 1
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert place.users() == 0 and list((tmp_path / "run" / "users-7").iterdir()) == []


def ends_at(place: Place, events: dict[float, Callable[[], object]], patch: pytest.MonkeyPatch) -> float:
    """When an unused server ends by a clock of its own; `events`: what happens when. At "ask" a request comes."""
    now, asked = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for at in [at for at in events if at <= now[0]]:
            if events.pop(at)() == "ask":
                asked[0] = now[0]

    patch.setattr("start_llm.service.place.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    ended: list[float] = []
    end_when_unused(lambda: now[0] - asked[0], place, 100.0, lambda: ended.append(now[0]), 1.0)
    return ended[0]


def test_an_unused_server_ends_and_a_busy_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(settings_in(tmp_path))
    assert ends_at(place, {}, monkeypatch) == 100.0
    assert ends_at(place, {60.0: lambda: "ask", 150.0: lambda: "ask"}, monkeypatch) == 250.0


def test_a_server_that_is_used_or_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(settings_in(tmp_path))
    using = place.used()
    using.__enter__()
    leave = partial(using.__exit__, None, None, None)
    events = {300.0: place.keep, 400.0: leave, 700.0: place.forget_keep}
    assert ends_at(place, events, monkeypatch) == 799.0, "its time counts from the last look that saw it kept"


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "other user"])
def test_a_state_that_is_not_a_file_of_ones_own_says_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the process that `stop` ends."""
    place = Place(settings_in(tmp_path))
    place.write(ServerState(os.getpid(), created(os.getpid())))
    assert place.read() is not None
    (path,) = place.folder.glob("*.json")
    if what == "other user":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    else:
        path.rename(tmp_path / "elsewhere")
        make = {"link": lambda: path.symlink_to(tmp_path / "elsewhere"), "pipe": lambda: os.mkfifo(path)}
        make.get(what, path.mkdir)()
    assert place.read() is None


def test_keeping_a_server_follows_no_link(tmp_path: Path) -> None:
    place = Place(settings_in(tmp_path))
    place.folder.mkdir(parents=True)
    (place.folder / f"server-{place.port}.keep").symlink_to(tmp_path / "elsewhere")
    place.keep()
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "ho me"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(units.sys, "platform", "linux")
    monkeypatch.setattr(units.sys.stdin, "isatty", lambda: False, raising=False)
    return load_settings(None, start_llm_cache_dir=tmp_path / "cache")


def make(system: str, linux: Settings) -> ServiceUnit:
    environment = {"PATH": "/bin", "SECRET": "x", "HF_HOME": "/hf"}
    return unit_for(system, linux, {"model_path": 'a "b" 100%'}, environment)


def verify(folder: Path, unit: ServiceUnit) -> None:
    if shutil.which("systemd-analyze"):
        (folder / unit.path.name).write_text(unit.text)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        command = ["systemd-analyze", "--user", "verify", str(folder / unit.path.name)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        # An unknown key or value is a warning: it ends with 0.
        assert (run.returncode, run.stderr) == (0, ""), run.stderr


@pytest.mark.live
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("planted", ["Restrt=always", "Restart=sometimes", "ExecStart=/nowhere/true"])
def test_systemd_finds_what_is_wrong_with_a_unit(planted: str, linux: Settings, tmp_path: Path) -> None:
    unit = make("linux", linux)
    with pytest.raises(AssertionError):
        verify(tmp_path, replace(unit, text=unit.text.replace("[Service]\n", f"[Service]\n{planted}\n")))


@pytest.mark.live
def test_the_systemd_unit(linux: Settings, tmp_path: Path) -> None:
    unit = make("linux", linux)
    path, text = unit.path, unit.text
    assert path == tmp_path / ".config/systemd/user/start-llm.service"
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    service = parser["Service"]
    assert shlex.split(service["ExecStart"])[1:] == ["-m", "start_llm", "supervise"]
    assert service["RestartPreventExitStatus"] == "1 2" and service["Restart"] == "on-failure"
    assert 'Environment="MODEL_PATH=a \\"b\\" 100%%"' in text
    assert f'Environment="START_LLM_HOME={tmp_path}/ho me"' in text
    assert "SECRET" not in text and 'Environment="HF_HOME=/hf"' in text
    assert parser["Install"]["WantedBy"] == "default.target"
    verify(tmp_path, make("linux", linux))


def test_the_launchd_unit(linux: Settings, tmp_path: Path) -> None:
    unit = make("darwin", linux)
    path, text = unit.path, unit.text
    assert path == tmp_path / "Library/LaunchAgents" / f"{LABEL}.plist"
    content = plistlib.loads(text.encode())
    assert content["Label"] == LABEL and content["ProgramArguments"][1:] == ["-m", "start_llm", "supervise"]
    assert content["EnvironmentVariables"]["MODEL_PATH"] == 'a "b" 100%'
    assert content["KeepAlive"] == {"SuccessfulExit": False} and content["WorkingDirectory"] == str(tmp_path / "ho me")
    assert unit.load[0][:3] == ("launchctl", "bootstrap", f"gui/{os.getuid()}")


def options(what: str, *, yes: bool = False) -> argparse.Namespace:
    return argparse.Namespace(what=what, yes=yes, overrides={}, from_env=False)


def test_settings_of_the_shell_are_told_and_written_if_asked(
    linux: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_THREADS", "7")
    monkeypatch.setenv("MLX_PORT", "9")
    asked = options("install")
    asked.overrides["mlx_port"] = "8099"
    assert units.main(linux, asked) == 0
    said = capsys.readouterr().out
    assert "HTTP_THREADS" in said.rpartition("Not written")[2] and "HTTP_THREADS=7" not in said
    assert "MLX_PORT=8099" in said
    asked.from_env = True
    assert units.main(linux, asked) == 0
    said = capsys.readouterr().out
    assert "7" in said.partition("HTTP_THREADS")[2][:40] and "Not written" not in said and "8099" in said


def test_keys_are_written_and_not_shown(
    linux: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("API_KEY", "sk-of-this-shell")
    monkeypatch.setattr(units, "_tell", lambda commands, done: 0)
    asked = options("install", yes=True)
    asked.from_env = True
    assert units.main(linux, asked) == 0
    said = capsys.readouterr().out
    path = make("linux", linux).path
    assert "sk-of-this-shell" in path.read_text() and path.stat().st_mode & 0o077 == 0
    assert "API_KEY" in said and "sk-of-this-shell" not in said


def test_it_is_shown_and_not_written_unless_agreed(linux: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("linux", linux).path
    assert units.main(linux, options("install")) == 0
    said = capsys.readouterr().out
    assert "[Service]" in said and str(path) in said and "--yes" in said and not path.exists()


def test_it_is_written_and_removed(
    linux: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], check: bool) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(units.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(units.subprocess, "run", run)
    path = make("linux", linux).path
    assert units.main(linux, options("install", yes=True)) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    waiting = path.with_suffix(".socket")  # as earlier versions wrote one
    waiting.write_text("[Socket]")
    assert units.main(linux, options("install", yes=True)) == 1
    assert "`start-llm service uninstall` first" in capsys.readouterr().err
    assert units.main(linux, options("uninstall")) == 0 and not path.exists() and not waiting.exists()
    assert [command[2] for command in ran] == ["daemon-reload", "enable", "disable"]
    assert ran[-1][4:] == (path.name, waiting.name)
    waiting.write_text("[Socket]")
    assert units.main(linux, options("uninstall")) == 0 and not waiting.exists()
    assert units.main(linux, options("uninstall")) == 0
    assert "no service is installed" in capsys.readouterr().out


def test_a_link_into_other_files_stays_a_link(linux: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(units.shutil, "which", lambda name: None)
    path = make("linux", linux).path
    kept = tmp_path / "dotfiles.service"
    kept.write_text("old")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(kept)
    units.main(linux, options("install", yes=True))
    assert path.is_symlink() and "[Service]" in kept.read_text()


def test_a_system_without_the_command_is_told_what_to_type(
    linux: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units.shutil, "which", lambda name: None)
    assert units.main(linux, options("install", yes=True)) == 1
    assert "systemctl --user daemon-reload" in capsys.readouterr().err
