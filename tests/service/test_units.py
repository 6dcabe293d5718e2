"""Texts only: neither systemd nor launchd runs here."""

from __future__ import annotations

import argparse
import configparser
import os
import plistlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from start_llm.core.settings import Settings, load_settings
from start_llm.service import units
from start_llm.service.units import Unit, unit_for


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "ho me"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return load_settings(None, start_llm_cache_dir=tmp_path / "cache")


def make(system: str, settings: Settings) -> Unit:
    return unit_for(system, settings, {"model_path": 'a "b" 100%'}, {"PATH": "/bin", "SECRET": "x", "HF_HOME": "/hf"})


def test_the_systemd_unit(settings: Settings, tmp_path: Path) -> None:
    unit = make("linux", settings)
    assert unit.path == tmp_path / ".config/systemd/user/start-llm.service"
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.text)
    service = parser["Service"]
    assert shlex.split(service["ExecStart"])[1:] == ["-m", "start_llm", "supervise"]
    assert service["RestartPreventExitStatus"] == "1 2" and service["Restart"] == "on-failure"
    assert 'Environment="MODEL_PATH=a \\"b\\" 100%%"' in unit.text
    assert f'Environment="START_LLM_HOME={tmp_path}/ho me"' in unit.text
    assert "SECRET" not in unit.text and 'Environment="HF_HOME=/hf"' in unit.text
    if shutil.which("systemd-analyze"):
        path = tmp_path / "start-llm.service"
        path.write_text(unit.text)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        subprocess.run(["systemd-analyze", "--user", "verify", str(path)], env=environment, check=True)


def test_the_launchd_unit(settings: Settings, tmp_path: Path) -> None:
    unit = make("darwin", settings)
    assert unit.path == tmp_path / "Library/LaunchAgents" / f"{units.LABEL}.plist"
    content = plistlib.loads(unit.text.encode())
    assert content["Label"] == units.LABEL and content["ProgramArguments"][1:] == ["-m", "start_llm", "supervise"]
    assert content["EnvironmentVariables"]["MODEL_PATH"] == 'a "b" 100%'
    assert content["KeepAlive"] == {"SuccessfulExit": False} and content["WorkingDirectory"] == str(tmp_path / "ho me")
    assert unit.load[0][:3] == ("launchctl", "bootstrap", f"gui/{os.getuid()}")


def options(what: str, *, yes: bool = False) -> argparse.Namespace:
    return argparse.Namespace(what=what, yes=yes, overrides={})


def test_it_is_shown_and_not_written_unless_agreed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units.sys, "platform", "linux")
    monkeypatch.setattr(units.sys.stdin, "isatty", lambda: False, raising=False)
    path = make("linux", settings).path
    assert units.main(settings, options("install")) == 0
    said = capsys.readouterr().out
    assert "[Service]" in said and str(path) in said and "--yes" in said and not path.exists()


def test_it_is_written_and_removed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], check: bool) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(units.sys, "platform", "linux")
    monkeypatch.setattr(units.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(units.subprocess, "run", run)
    path = make("linux", settings).path
    assert units.main(settings, options("install", yes=True)) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert units.main(settings, options("uninstall")) == 0 and not path.exists()
    assert [command[2] for command in ran] == ["daemon-reload", "enable", "disable"]
    assert units.main(settings, options("uninstall")) == 0
    assert "no service is installed" in capsys.readouterr().out


def test_a_system_without_the_command_is_told_what_to_type(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units.sys, "platform", "linux")
    monkeypatch.setattr(units.shutil, "which", lambda name: None)
    assert units.main(settings, options("install", yes=True)) == 1
    assert "systemctl --user daemon-reload" in capsys.readouterr().err
