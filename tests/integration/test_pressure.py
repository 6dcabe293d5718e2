"""Other programs need the machine's memory while the server works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from start_llm.engine.schedule import memory
from start_llm.engine.thread import LONG_PROMPT
from start_llm.host import pressure
from start_llm.host.pressure import Pressure, Reading
from tests.integration.live import TOOLS, Live, echoed, live
from tests.oracle import expected_truth
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


def ask(server: Live, messages: list[dict[str, Any]]) -> dict[str, Any]:
    answer = server.chat(messages, tools=TOOLS)
    assert answer["message"]["content"] == expected_truth(server.prompt_of(answer))
    messages.append(echoed(answer["message"], "keep"))
    return dict(answer["report"])


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
    machine: Machine, oracle_path: Callable[..., Path], tmp_path: Path, kind: str, level: Pressure
) -> None:
    messages = [{"role": "user", "content": words("code", 5000) + "[[truth]]"}]
    with live(oracle_path(kind), tmp_path, kv_disk_dir="auto") as server:
        ask(server, messages)
        bytes_of = lambda: server.app.engine.call(lambda scheduler: scheduler.figures()["kv_bytes"])  # noqa: E731
        before = bytes_of()
        machine.level = level
        until(lambda: bytes_of() < before / 10)
        assert "Other programs need" in server.get("/health").json()["detail"]
        until(lambda: server.figure("memory_pressure") == level)
        messages.append({"role": "user", "content": words("next", 200) + "[[truth]]"})
        report = ask(server, messages)
        assert report["computed"] <= 1.05 * report["new"] + 10
        machine.level = Pressure.NORMAL
        until(lambda: server.get("/health").json()["detail"] == "")
        messages.append({"role": "user", "content": words("last", 200) + "[[truth]]"})
        ask(server, messages)
        assert bytes_of() >= before


def test_a_long_new_prompt_is_refused_and_a_conversation_goes_on(
    machine: Machine, oracle_path: Callable[..., Path], tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": words("code", LONG_PROMPT + 1000) + "[[truth]]"}]
    with live(oracle_path("plain"), tmp_path, kv_disk_dir="auto") as server:
        ask(server, messages)
        machine.level = Pressure.CRITICAL
        until(lambda: "long new prompts" in server.get("/health").json()["detail"])
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": words("other", LONG_PROMPT + 1000)}],
            "max_tokens": 4,
        }
        refused = server.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503 and "Close another program" in refused.text
        assert refused.headers["retry-after"] == "10"
        messages.append({"role": "user", "content": "[[truth]]"})
        ask(server, messages)
