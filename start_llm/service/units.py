"""The commands `service install` and `service uninstall`: the server as a service of systemd or launchd, per user."""

from __future__ import annotations

import argparse
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from start_llm.core.exitcodes import ExitCode
from start_llm.core.settings import Settings
from start_llm.host.home import home, made_home, module_command, python_path

LABEL = "io.start-llm.server"
_KEPT = ("PATH", "LD_PRELOAD", "HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE", "START_LLM_CACHE_DIR", "START_LLM_COMMAND")
RESTART_SECONDS = 10


@dataclass(frozen=True)
class Unit:
    """A service's description for the system.

    Attributes:
        path: where it belongs.
        text: what stands in it.
        load, unload: commands that tell the system of it, and that it goes.
    """

    path: Path
    text: str
    load: tuple[tuple[str, ...], ...]
    unload: tuple[tuple[str, ...], ...]


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Shows the unit, asks, writes it and has the system start it; 1 where that fails."""
    flags = {name: str(value) for name, value in options.overrides.items()}
    unit = unit_for(sys.platform, settings, flags, os.environ)
    if options.what == "uninstall":
        return _uninstall(unit)
    print(f"{unit.path}:\n\n{unit.text}")
    if not (options.yes or _agreed()):
        print("Nothing was written; --yes writes it without asking.")
        return 0
    made_home()
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    unit.path.write_text(unit.text)
    unit.path.chmod(0o600)
    return _tell(unit.load, "installed; `start-llm status` tells how it does")


def _uninstall(unit: Unit) -> int:
    if not unit.path.exists():
        print(f"There is no {unit.path}: no service is installed.")
        return 0
    code = _tell(unit.unload, "uninstalled")
    unit.path.unlink()
    return code


def unit_for(system: str, settings: Settings, flags: Mapping[str, str], environment: Mapping[str, str]) -> Unit:
    """The unit of this system; both run the supervisor.

    Args:
        system: as ``sys.platform`` says.
        flags: settings that were given as flags.
        environment: of the user's shell; what the server needs of it is written down.
    """
    variables = {name: environment[name] for name in _KEPT if name in environment}
    variables |= {"START_LLM_HOME": str(home()), "PYTHONPATH": python_path()}
    variables |= {name.upper(): value for name, value in flags.items()}
    if system == "darwin":
        return _launchd(settings, variables)
    return _systemd(variables)


def _systemd(variables: Mapping[str, str]) -> Unit:
    path = Path("~/.config/systemd/user/start-llm.service").expanduser()
    lines = [f'Environment="{name}={_escaped(value)}"' for name, value in variables.items()]
    hopeless = f"{ExitCode.NOT_STARTED:d} {ExitCode.BAD_SETTING:d}"
    text = "\n".join(
        [
            "[Unit]",
            "Description=start_llm, a local LLM server for coding agents",
            "",
            "[Service]",
            f"ExecStart={_exec(module_command('supervise'))}",
            f"WorkingDirectory={_percent(str(home()))}",
            *lines,
            "Restart=on-failure",
            f"RestartSec={RESTART_SECONDS}",
            f"RestartPreventExitStatus={hopeless}",
            "KillMode=mixed",
            "TimeoutStopSec=80",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )
    control = ("systemctl", "--user")
    load = ((*control, "daemon-reload"), (*control, "enable", "--now", path.name))
    return Unit(path, text, load, ((*control, "disable", "--now", path.name),))


def _exec(words: Sequence[str]) -> str:
    return " ".join(f'"{_escaped(word)}"' for word in words)


def _escaped(text: str) -> str:
    """For double quotes in a unit: its own escapes, and `%` and `$` are not to be expanded."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return _percent(quoted)


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _launchd(settings: Settings, variables: Mapping[str, str]) -> Unit:
    path = Path(f"~/Library/LaunchAgents/{LABEL}.plist").expanduser()
    log = home() / settings.log_root.expanduser() / "launchd.log"
    content = {
        "Label": LABEL,
        "ProgramArguments": module_command("supervise"),
        "WorkingDirectory": str(home()),
        "EnvironmentVariables": dict(variables),
        "RunAtLoad": True,
        # Started again after a crash, not after an end that was asked for; a setting that is wrong is tried again at
        # this pace, since launchd knows no codes for which it should not.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": 80,
        "ProcessType": "Interactive",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    text = plistlib.dumps(content).decode("utf-8")
    domain = f"gui/{os.getuid()}"
    load = (("launchctl", "bootstrap", domain, str(path)),)
    return Unit(path, text, load, (("launchctl", "bootout", f"{domain}/{LABEL}"),))


def _agreed() -> bool:
    return sys.stdin.isatty() and input("Write it and start the server? [y/N] ").strip().lower() in {"y", "yes"}


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
