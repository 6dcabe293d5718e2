"""Other programs need the machine's memory while the server works."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.engine.schedule import memory
from start_llm.engine.thread import LONG_PROMPT
from start_llm.host import pressure
from start_llm.host.pressure import Pressure, Reading
from tests.integration.live import TOOLS, Start
from tests.waiting import until


class Machine:
    """Says what the test wants; nothing else reads the machine's memory meanwhile."""

    def __init__(self) -> None:
        self.level = Pressure.NORMAL

    def read(self) -> Reading:
        return Reading(self.level, self.level)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(pressure, "read_linux", found.read)
    monkeypatch.setattr(pressure, "read_mac", found.read)
    monkeypatch.setattr(pressure, "STEADY_SECONDS", 0.0)
    monkeypatch.setattr(memory, "LEAST_STORED", 0)  # the oracle's KV is small
    return found


def words(tag: str, tokens: int) -> str:
    return f"{tag} " * tokens


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("hybrid", Pressure.WARNING),
        ("plain", Pressure.CRITICAL),
        pytest.param("plain", Pressure.WARNING, marks=pytest.mark.thorough),
        pytest.param("hybrid", Pressure.CRITICAL, marks=pytest.mark.thorough),
    ],
)
def test_stored_kv_leaves_memory_and_comes_back_from_disk(
    machine: Machine, start: Start, kind: str, level: Pressure
) -> None:
    messages: list[dict[str, Any]] = []
    with start(kind, kv_disk_dir="auto") as server:
        server.turn(messages, words("code", 5000), tools=TOOLS)
        bytes_of = lambda: server.app.engine.call(lambda scheduler: scheduler.figures()["kv_bytes"])  # noqa: E731
        before = bytes_of()
        machine.level = level
        until(lambda: bytes_of() < before / 10)
        assert "Other programs need" in server.get("/health").json()["detail"]
        until(lambda: server.figure("memory_pressure") == level)
        report = server.turn(messages, words("next", 200), tools=TOOLS)
        assert report["computed"] <= 1.05 * report["new"] + 10
        machine.level = Pressure.NORMAL
        until(lambda: server.get("/health").json()["detail"] == "")
        server.turn(messages, words("last", 200), tools=TOOLS)
        assert bytes_of() >= before


def test_a_long_new_prompt_is_refused_and_a_conversation_goes_on(machine: Machine, start: Start) -> None:
    messages: list[dict[str, Any]] = []
    with start(kv_disk_dir="auto") as server:
        server.turn(messages, words("code", LONG_PROMPT + 1000), tools=TOOLS)
        machine.level = Pressure.CRITICAL
        until(lambda: "long new prompts" in server.get("/health").json()["detail"])
        other = [{"role": "user", "content": words("other", LONG_PROMPT + 1000)}]
        refused = server.post("/v1/chat/completions", json={"messages": other, "max_tokens": 4})
        assert refused.status_code == 503 and "Close another program" in refused.text
        assert refused.headers["retry-after"] == "10"
        server.turn(messages, "", tools=TOOLS)
