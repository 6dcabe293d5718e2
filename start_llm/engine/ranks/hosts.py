"""Which machines compute one model together, and what is off meanwhile."""

from __future__ import annotations

import json
import shlex
import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from start_llm import __version__
from start_llm.core.paths import expanded
from start_llm.core.settings import SECRETS, Settings, SettingsError
from start_llm.host.home import module_command

OFF = {
    "draft_model": "off",
    "vision": "off",
    "kv_disk_dir": "off",
    "kv_bits": None,
    "model_probe": "off",
    "preload_models": "",
}
"""Settings that have these values with several hosts: what they bring depends on what one machine measures or has."""
OWN_SETTINGS = {"start_llm_cache_dir", "log_level", "hosts", "hostfile"}
"""What each machine has for itself."""


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank runs. `name`: for ssh; `address`: for the others."""

    name: str
    address: str

    @property
    def is_local(self) -> bool:
        return self.address.startswith("127.")


def versions() -> dict[str, str]:
    """What must be the same on all ranks: other versions compute other numbers, or another order of passes."""
    return {"start_llm": __version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")}


def host_command(host: RankHost, *arguments: str) -> list[str]:
    """The command that runs this package on a host: on another one, as `mlx.launch` has it, by ssh, in the same folder
    and Python."""
    command = module_command(*arguments)
    if host.is_local:
        return command
    folder = shlex.quote(str(Path.cwd()))
    # After "--" a name that begins with "-" is no option of ssh.
    return ["ssh", "-o", "BatchMode=yes", "--", host.name, f"cd {folder} && exec {shlex.join(command)}"]


def rank_hosts(settings: Settings) -> list[RankHost]:
    """Those of HOSTFILE, else of HOSTS, this machine first; empty: there is one machine. Raises SettingsError."""
    if settings.hostfile is not None:
        return _read(settings)
    names = [name for name in settings.hosts.split(",") if name]
    return [RankHost(name, _address(name)) for name in names]


def one_model_only(settings: Settings) -> Settings:
    """What several hosts can do. Raises SettingsError: it asks for something that they cannot."""
    if settings.adapter_path is not None:
        raise SettingsError("ADAPTER_PATH cannot be used with HOSTS: an adapter is not divided.")
    return settings.model_copy(update=OFF)


def shared_settings(settings: Settings) -> dict[str, Any]:
    """Rank 0's settings, as far as they are all ranks'."""
    return settings.model_dump(mode="json", exclude=OWN_SETTINGS.union(SECRETS))


def _read(settings: Settings) -> list[RankHost]:
    """A list of hosts, or an object with ``hosts``; each has ``ssh`` and ``ips``. Raises SettingsError."""
    path = settings.hostfile
    assert path is not None
    try:
        content = json.loads(expanded(path).read_text("utf-8"))
        listed = content["hosts"] if isinstance(content, dict) else content
        hosts = [RankHost(str(each["ssh"]), str(each["ips"][0])) for each in listed]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        wanted = 'it must be a JSON list of {"ssh": NAME, "ips": [ADDRESS]}'
        raise SettingsError(f"HOSTFILE={path}: {wanted}: {type(error).__name__}: {error}") from None
    if len(hosts) < 2:
        raise SettingsError(f"HOSTFILE={path}: it names {len(hosts)} hosts; two or more are needed, this one first.")
    return hosts


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise SettingsError(f"HOSTS: the address of {name!r} is not known: {error}") from None
