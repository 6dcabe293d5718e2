"""A listening socket that the system holds for the server: the first connection starts it (systemd, launchd).

The supervisor takes the socket from the system and hands it to each engine that it starts. While none runs, connections
wait in the socket; an engine accepts them once it can answer.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import MutableMapping
from typing import Any

LISTEN_FD = "START_LLM_LISTEN_FD"
"""From the supervisor to the engine: the number of the descriptor. It is set until the engine has taken the socket."""
LAUNCHD_SOCKET = "START_LLM_LAUNCHD_SOCKET"
"""In launchd's unit: the socket's name there."""
_FIRST_FD = 3

Environment = MutableMapping[str, str]


def take_from_system(environment: Environment) -> int | None:
    """The descriptor that systemd or launchd has for this process, if there is one; it is taken once. Raises OSError:
    launchd has none by the name that it should have."""
    given = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if given[0] == str(os.getpid()) and given[1].isdigit() and int(given[1]) >= 1:
        return _FIRST_FD
    name = environment.pop(LAUNCHD_SOCKET, None)
    return None if name is None else _from_launchd(name, ctypes.CDLL(None))


def take_from_supervisor(environment: Environment) -> socket.socket | None:
    """The engine's own hold of the socket. Raises OSError where the descriptor is none."""
    number = environment.pop(LISTEN_FD, None)
    if number is None:
        return None
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    return listener


def _from_launchd(name: str, library: Any) -> int:
    """The first of the sockets of that name; others are closed."""
    found, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    error = library.launch_activate_socket(name.encode(), ctypes.byref(found), ctypes.byref(count))
    if error or not count.value:
        raise OSError(error, f"launchd has no socket {name!r} for this process")
    first, *others = (found[i] for i in range(count.value))
    library.free(found)
    for other in others:
        os.close(other)
    return int(first)
