"""Where the units of systemd and launchd lie, and whether one of them holds a server's port for it."""

from __future__ import annotations

import plistlib
import re
import sys
from pathlib import Path

from start_llm.host.ports import is_free
from start_llm.service.place import Place

LABEL = "io.start-llm.server"


def service_path() -> Path:
    return Path("~/.config/systemd/user/start-llm.service").expanduser()


def socket_path() -> Path:
    return service_path().with_suffix(".socket")


def agent_path() -> Path:
    return Path(f"~/Library/LaunchAgents/{LABEL}.plist").expanduser()


def installed_on_demand() -> bool | None:
    """Whether the service that is installed is started by its first request; ``None`` if there is none."""
    if on_demand_port() is not None:
        return True
    return False if service_path().exists() or agent_path().exists() else None


def on_demand_port() -> int | None:
    """The port that the system listens on for the server, by the unit that is installed."""
    try:
        if sys.platform == "darwin":
            sockets = plistlib.loads(agent_path().read_bytes())["Sockets"]
            return int(next(iter(sockets.values()))["SockServiceName"])
        found = re.search(r"^ListenStream=.*:(\d+)$", socket_path().read_text("utf-8"), re.MULTILINE)
        return int(found[1]) if found else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, plistlib.InvalidFileException):
        return None


def is_waiting(place: Place) -> bool:
    """Whether the system holds the port and no server runs: asking there would start one."""
    return on_demand_port() == place.port and not place.is_running and not is_free(place.host, place.port)
