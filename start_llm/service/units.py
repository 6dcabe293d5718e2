"""The commands `service install` and `service uninstall`: the server as a service of systemd or launchd, per user."""

from __future__ import annotations

import argparse
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start_llm.core.errors import ExitCode
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings, setting_names
from start_llm.files.atomic import write_atomic
from start_llm.host.hints import hint
from start_llm.host.home import command as program
from start_llm.host.home import home, made_home, module_command, python_path

LABEL = "io.start-llm.server"
_KEPT = ("PATH", "LD_PRELOAD", "HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE", "START_LLM_CACHE_DIR", "START_LLM_COMMAND")
RESTART_SECONDS = 10
TEMPLATE = Path(__file__).with_name("systemd.service")


@dataclass(frozen=True)
class ServiceUnit:
    """A service for the system: its file, and the commands that tell of it, and that it goes."""

    path: Path
    text: str
    load: tuple[tuple[str, ...], ...]
    unload: tuple[tuple[str, ...], ...]


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Shows the unit, asks, writes it and has the system start it; 1 where that fails."""
    of_shell = _set_by_shell(options.overrides)
    flags = ({name.lower(): value for name, value in of_shell.items()} if options.from_env else {}) | options.overrides
    unit = unit_for(sys.platform, settings, flags, os.environ)
    if options.what == "uninstall":
        return _uninstall(unit)
    if unit.path.with_suffix(".socket").exists():  # the system would go on to hold the port
        print(f"A service of an earlier version is installed; `{program()} service uninstall` first.", file=sys.stderr)
        return 1
    # A terminal keeps what it has shown, and so do the logs of a setup script.
    shown = {name: "(not shown)" if name.endswith("_key") else value for name, value in flags.items()}
    print(f"{unit.path}:\n\n{unit_for(sys.platform, settings, shown, os.environ).text}")
    if of_shell and not options.from_env:
        where = f"--from-env writes it; or put it into {home() / '.env'}."
        print(f"Not written, though this shell sets it: {', '.join(of_shell)}. {where}")
    asked = "Write it and start the server? [y/N] "
    if not options.yes and not (sys.stdin.isatty() and input(asked).strip().lower() in {"y", "yes"}):
        print("Nothing was written; --yes writes it without asking.")
        return 0
    made_home()
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(unit.path.resolve(), unit.text)  # a link into one's dotfiles stays a link
    return _tell(unit.load, f"installed; `{hint('status', settings.mlx_port)}` tells how it does")


def _set_by_shell(overrides: Mapping[str, str]) -> dict[str, str]:
    """Settings of this shell's environment that no flag overrides."""
    settable = (name for name in setting_names() if name not in _KEPT and name.lower() not in overrides)
    return {name: os.environ[name] for name in settable if os.environ.get(name)}


def _uninstall(unit: ServiceUnit) -> int:
    # earlier versions could wait at a socket
    files = [file for file in (unit.path, unit.path.with_suffix(".socket")) if file.exists()]
    if not files:
        print(f"There is no {unit.path}: no service is installed.")
        return 0
    code = _tell(unit.unload, "uninstalled")
    for file in files:
        file.unlink(missing_ok=True)
    return code


def unit_for(system: str, settings: Settings, flags: Mapping[str, str], environment: Mapping[str, str]) -> ServiceUnit:
    """The unit of this `system` (``sys.platform``), which runs the supervisor with what it needs of `environment`."""
    variables = {name: environment[name] for name in _KEPT if name in environment}
    variables |= {"START_LLM_HOME": str(home()), "PYTHONPATH": python_path()}
    variables |= {name.upper(): value for name, value in flags.items()}
    return _launchd(settings, variables) if system == "darwin" else _systemd(variables)


def _systemd(variables: Mapping[str, str]) -> ServiceUnit:
    path = Path("~/.config/systemd/user/start-llm.service").expanduser()
    control = ("systemctl", "--user")
    command = " ".join(f'"{_escaped(word)}"' for word in module_command("supervise"))
    environment = "\n".join(f'Environment="{name}={_escaped(value)}"' for name, value in variables.items())
    filled = {
        "COMMAND": command,
        "FOLDER": str(home()).replace("%", "%%"),
        "ENVIRONMENT": environment,
        "SECONDS": str(RESTART_SECONDS),
        "CODES": f"{ExitCode.NOT_STARTED:d} {ExitCode.BAD_SETTING:d}",
    }
    text = re.sub("@([A-Z]+)@", lambda found: filled[found[1]], TEMPLATE.read_text("utf-8"))
    load = ((*control, "daemon-reload"), (*control, "enable", "--now", path.name))
    known = [file.name for file in (path, path.with_suffix(".socket")) if file.exists()]
    return ServiceUnit(path, text, load, ((*control, "disable", "--now", *known),))


def _escaped(text: str) -> str:
    """For double quotes in a unit: its own escapes, and `%` is not to be expanded."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")


def _launchd(settings: Settings, variables: Mapping[str, str]) -> ServiceUnit:
    path = Path(f"~/Library/LaunchAgents/{LABEL}.plist").expanduser()
    log = str(home() / expanded(settings.log_root) / "launchd.log")
    content: dict[str, Any] = {
        "Label": LABEL,
        "ProgramArguments": module_command("supervise"),
        "WorkingDirectory": str(home()),
        "EnvironmentVariables": dict(variables),
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": 80,
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "RunAtLoad": True,
        # Started again after a crash, not after an end that was asked for; a setting that is wrong is tried again at
        # this pace, since launchd knows no codes for which it should not.
        "KeepAlive": {"SuccessfulExit": False},
    }
    domain = f"gui/{os.getuid()}"
    load = (("launchctl", "bootstrap", domain, str(path)),)
    unload = (("launchctl", "bootout", f"{domain}/{LABEL}"),)
    return ServiceUnit(path, plistlib.dumps(content).decode("utf-8"), load, unload)


def _tell(commands: Sequence[tuple[str, ...]], done: str) -> int:
    """Has the system know; where its command is missing or fails, says what is to be typed."""
    for command in commands:
        missing = shutil.which(command[0]) is None
        if missing or subprocess.run(command, check=False).returncode != 0:
            why = f"{command[0]} is not here" if missing else "that failed"
            print(f"{why}; once it can be done: {shlex.join(command)}", file=sys.stderr)
            return 1
    print(done)
    return 0
