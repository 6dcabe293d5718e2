from __future__ import annotations

import os
import socket

import pytest

from start_llm.host.ports import address, free_port, is_free, listener, who_listens


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
