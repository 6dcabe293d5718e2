from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

import pytest

from start_llm.host import activation
from start_llm.host.activation import LISTEN_FD, take_from_supervisor, take_from_system


def test_systemd_gives_its_first_socket_to_the_process_that_it_means() -> None:
    mine, others = str(os.getpid()), str(os.getpid() + 1)
    given = {"LISTEN_PID": mine, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "PATH": "/bin"}
    assert take_from_system(given) == 3 and given == {"PATH": "/bin"}  # children inherit none of it
    none = {"LISTEN_PID": mine, "LISTEN_FDS": "0"}
    for wrong in ({"LISTEN_PID": others, "LISTEN_FDS": "1"}, none, {"LISTEN_FDS": "x"}, {}):
        assert take_from_system(dict(wrong)) is None


class Launchd:
    """`launch_activate_socket` with these descriptors."""

    def __init__(self, *descriptors: int) -> None:
        self._array = (ctypes.c_int * len(descriptors))(*descriptors)
        self.freed = False

    def launch_activate_socket(self, name: bytes, found: Any, count: Any) -> int:
        if name != b"Listeners":
            return 2
        found._obj.contents = self._array._type_.from_buffer(self._array) if len(self._array) else ctypes.c_int()
        count._obj.value = len(self._array)
        return 0

    def free(self, found: Any) -> None:
        self.freed = True


def test_launchd_is_asked_by_the_sockets_name(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    library = Launchd(read, write)
    monkeypatch.setattr(activation.ctypes, "CDLL", lambda name: library)
    given = {"START_LLM_LAUNCHD_SOCKET": "Listeners"}
    assert take_from_system(given) == read and given == {} and library.freed
    with pytest.raises(OSError):  # one is enough
        os.fstat(write)
    os.close(read)
    with pytest.raises(OSError, match="no socket 'Other'"):
        take_from_system({"START_LLM_LAUNCHD_SOCKET": "Other"})
    monkeypatch.setattr(activation.ctypes, "CDLL", lambda name: Launchd())
    with pytest.raises(OSError, match="no socket"):
        take_from_system({"START_LLM_LAUNCHD_SOCKET": "Listeners"})


def test_the_engine_takes_it_once() -> None:
    assert take_from_supervisor({}) is None
    with socket.create_server(("127.0.0.1", 0)) as held:
        given = {LISTEN_FD: str(os.dup(held.fileno()))}
        with take_from_supervisor(given) or held as taken:
            assert taken.getsockname() == held.getsockname() and taken is not held and not taken.get_inheritable()
    assert LISTEN_FD not in given
    with pytest.raises(OSError):
        take_from_supervisor({LISTEN_FD: "987654"})
