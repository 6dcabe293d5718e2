"""What `tests/__init__.py` does to httpx, whose internals it uses."""

import ssl

import httpx
import pytest


def test_a_second_client_reads_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx.Client().close()
    read: list[object] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: read.append(1))
    httpx.Client().close()
    assert not read


def test_by_itself_it_waits_for_a_minute() -> None:
    assert httpx.Client().timeout == httpx.AsyncClient().timeout == httpx.Timeout(60.0)
