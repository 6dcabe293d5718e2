"""Texts only: neither systemd nor launchd runs here."""

from __future__ import annotations

import argparse
import configparser
import os
import plistlib
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from start_llm.core.settings import Settings, load_settings
from start_llm.service import units
from start_llm.service.units import LABEL, ServiceUnit, unit_for


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "ho me"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(units.sys, "platform", "linux")
    monkeypatch.setattr(units.sys.stdin, "isatty", lambda: False, raising=False)
    return load_settings(None, start_llm_cache_dir=tmp_path / "cache")


def make(system: str, settings: Settings) -> ServiceUnit:
    environment = {"PATH": "/bin", "SECRET": "x", "HF_HOME": "/hf"}
    return unit_for(system, settings, {"model_path": 'a "b" 100%'}, environment)


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
def test_systemd_finds_what_is_wrong_with_a_unit(planted: str, settings: Settings, tmp_path: Path) -> None:
    unit = make("linux", settings)
    with pytest.raises(AssertionError):
        verify(tmp_path, replace(unit, text=unit.text.replace("[Service]\n", f"[Service]\n{planted}\n")))


@pytest.mark.live
def test_the_systemd_unit(settings: Settings, tmp_path: Path) -> None:
    unit = make("linux", settings)
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
    verify(tmp_path, make("linux", settings))


def test_the_launchd_unit(settings: Settings, tmp_path: Path) -> None:
    unit = make("darwin", settings)
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
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_THREADS", "7")
    monkeypatch.setenv("MLX_PORT", "9")
    asked = options("install")
    asked.overrides["mlx_port"] = "8099"
    assert units.main(settings, asked) == 0
    said = capsys.readouterr().out
    assert "HTTP_THREADS" in said.rpartition("Not written")[2] and "HTTP_THREADS=7" not in said
    assert "MLX_PORT=8099" in said
    asked.from_env = True
    assert units.main(settings, asked) == 0
    said = capsys.readouterr().out
    assert "7" in said.partition("HTTP_THREADS")[2][:40] and "Not written" not in said and "8099" in said


def test_keys_are_written_and_not_shown(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("API_KEY", "sk-of-this-shell")
    monkeypatch.setattr(units, "_tell", lambda commands, done: 0)
    asked = options("install", yes=True)
    asked.from_env = True
    assert units.main(settings, asked) == 0
    said = capsys.readouterr().out
    path = make("linux", settings).path
    assert "sk-of-this-shell" in path.read_text() and path.stat().st_mode & 0o077 == 0
    assert "API_KEY" in said and "sk-of-this-shell" not in said


def test_it_is_shown_and_not_written_unless_agreed(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
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

    monkeypatch.setattr(units.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(units.subprocess, "run", run)
    path = make("linux", settings).path
    assert units.main(settings, options("install", yes=True)) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    waiting = path.with_suffix(".socket")  # as earlier versions wrote one
    waiting.write_text("[Socket]")
    assert units.main(settings, options("install", yes=True)) == 1
    assert "`start-llm service uninstall` first" in capsys.readouterr().err
    assert units.main(settings, options("uninstall")) == 0 and not path.exists() and not waiting.exists()
    assert [command[2] for command in ran] == ["daemon-reload", "enable", "disable"]
    assert ran[-1][4:] == (path.name, waiting.name)
    waiting.write_text("[Socket]")
    assert units.main(settings, options("uninstall")) == 0 and not waiting.exists()
    assert units.main(settings, options("uninstall")) == 0
    assert "no service is installed" in capsys.readouterr().out


def test_a_link_into_other_files_stays_a_link(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(units.shutil, "which", lambda name: None)
    path = make("linux", settings).path
    kept = tmp_path / "dotfiles.service"
    kept.write_text("old")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(kept)
    units.main(settings, options("install", yes=True))
    assert path.is_symlink() and "[Service]" in kept.read_text()


def test_a_system_without_the_command_is_told_what_to_type(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units.shutil, "which", lambda name: None)
    assert units.main(settings, options("install", yes=True)) == 1
    assert "systemctl --user daemon-reload" in capsys.readouterr().err
