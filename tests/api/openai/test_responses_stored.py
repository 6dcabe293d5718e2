"""Responses that are stored: found again, bounded, and told if they could not be."""

from __future__ import annotations

import random
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from start_llm.api.openai import responses_store
from start_llm.api.openai.responses_store import ResponsesStore
from start_llm.files.database import FileUnavailable
from tests.api.fakes import FakeService
from tests.vendors import openai


def test_store_is_bounded_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(responses_store, "MOST", 3)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = ResponsesStore(tmp_path / "sub" / "r.sqlite3")
    mine = store.of("me")
    for name in "abcd":
        now[0] += 1
        mine.put({"id": name, "output": []}, [name])
    assert mine.get("a") is None
    found = mine.get("b")
    assert found is not None and found.items == ["b"]
    now[0] += 1
    mine.put({"id": "e", "output": []}, [])
    assert mine.get("c") is None, "the least recently used goes"
    assert mine.get("b") is not None
    store.close()
    monkeypatch.setattr(time, "time", lambda: 5.0)  # the machine's clock was set back
    again = ResponsesStore(tmp_path / "sub" / "r.sqlite3")
    mine = again.of("me")
    assert mine.get("e") is not None
    monkeypatch.setattr(time, "time", lambda: 5e9)  # and far ahead, while it runs
    assert mine.get("e") is not None
    now[0] += 86401
    assert mine.get("e") is None
    again.close()
    assert stat.S_IMODE((tmp_path / "sub" / "r.sqlite3").stat().st_mode) == 0o600


def test_stored_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_store, "MOST_BYTES", 10_000)
    store = ResponsesStore(tmp_path / "r.sqlite3")
    mine = store.of("me")
    for name in "abc":
        mine.put({"id": name}, [random.Random(name).randbytes(2000).hex()])
    assert [name for name in "abc" if mine.get(name)] == ["a", "b", "c"]
    mine.put({"id": "d"}, [random.Random("d").randbytes(6000).hex()])
    assert [name for name in "abcd" if mine.get(name)] == ["c", "d"]
    with pytest.raises(FileUnavailable, match="10000"):
        mine.put({"id": "e"}, [random.Random("e").randbytes(11_000).hex()])
    assert [name for name in "abcde" if mine.get(name)] == ["c", "d"]


def test_a_changed_entry_is_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.sqlite3"
    store = ResponsesStore(path)
    mine = store.of("me")
    mine.put({"id": "a"}, ["something said"])
    mine.put({"id": "b"}, [])
    connection = sqlite3.connect(path)
    connection.execute("UPDATE responses SET items = zeroblob(20) WHERE id = 'a'")
    connection.commit()
    connection.close()
    assert mine.get("a") is None
    assert caplog.text.count("is damaged") == 1
    mine.put({"id": "c"}, [])
    assert mine.get("c") is not None


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes fail as on a full disk, though there seems to be room."""

    def run(self: ResponsesStore, act: Callable[[sqlite3.Connection, float], Any]) -> Any:
        if act.__name__ == "write":
            raise FileUnavailable("stored responses: database or disk is full")
        return plain(self, act)

    plain = ResponsesStore.run
    monkeypatch.setattr(ResponsesStore, "run", run)


def test_what_cannot_be_stored_is_not_computed(
    client: openai.OpenAI, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(openai.InternalServerError, match="disk") as caught:
        client.responses.create(model="m", input="Hi", store=True)
    assert caught.value.status_code == 503 and "Retry-After" in caught.value.response.headers
    assert service.requests == []


def test_what_could_not_be_stored_is_an_error_if_it_was_asked_for(
    client: openai.OpenAI, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch)
    with pytest.raises(openai.InternalServerError, match="disk is full") as caught:
        client.responses.create(model="m", input="Hi", store=True)
    assert caught.value.status_code == 503
    events = list(client.responses.create(model="m", input="Hi", store=True, stream=True))
    assert events[-1].type == "response.failed" and "disk is full" in events[-1].response.error.message
    quiet: Any = client.responses.create(model="m", input="Hi")
    assert quiet.status == "completed" and quiet.store is False
    last: Any = list(client.responses.create(model="m", input="Hi", stream=True))[-1].response
    assert last.status == "completed" and last.store is False
