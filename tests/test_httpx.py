"""What `tests/__init__.py` does to httpx, which is an internal of it."""

import ssl

import httpx
import pytest


def test_a_second_client_reads_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx.Client().close()
    read: list[object] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: read.append(1))
    httpx.Client().close()
    assert not read
