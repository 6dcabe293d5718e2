from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.events import ReasoningDelta, TextDelta, ToolCallFinished
from start_llm.core.messages import Message, ToolCall
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Outcome
from start_llm.dashboard.process_log import HIDDEN, Redactor
from start_llm.dashboard.request_log import Dumps

KEY = "sk-" + "a1B2" * 8
REQUEST = ChatRequest(
    "chatcmpl-abc",
    "chat",
    "m",
    messages=(Message("user", f"my key is {KEY}"), Message("assistant", "", "why", (ToolCall("1", "f", "{}"),))),
)


def read(root: Path) -> Any:
    (path,) = (root / "dumps").rglob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return json.loads(path.read_text())


def test_prompt_and_answer_are_there_and_keys_are_not(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path, Redactor(["hunter22"]))
    dumps.started(REQUEST)
    dumps.prompt(REQUEST.id, f"<user>my key is {KEY}, hunter22")
    for event in (ReasoningDelta("hm"), TextDelta("it is sk-a1B2a1B2"), TextDelta("a1B2a1B2a1B2"), TextDelta(".")):
        dumps.event(REQUEST, event)
    dumps.event(REQUEST, ToolCallFinished(0, "1", "bash", '{"x": 1}'))
    dumps.ended(REQUEST, Outcome(200, 1.0))
    told = read(tmp_path)
    assert told["id"] == REQUEST.id and told["status"] == 200
    assert told["prompt"] == [f"<user>my key is {HIDDEN}, {HIDDEN}"]
    assert told["sent"][0] == {"role": "user", "content": f"my key is {HIDDEN}"}
    assert told["sent"][1]["calls"] == [{"name": "f", "arguments": "{}"}] and told["sent"][1]["reasoning"] == "why"
    (answer,) = told["answer"]
    assert answer["text"].startswith(f"it is {HIDDEN}") and answer["reasoning"] == "hm"
    assert answer["calls"] == [{"name": "bash", "arguments": '{"x": 1}'}]


def test_dumps_are_bounded(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path, Redactor(), 320_000)
    for number in range(60):
        request = ChatRequest(f"id-{number:02}", "chat", "m", messages=(Message("user", "x" * 1_000_000),))
        dumps.started(request)
        dumps.prompt(request.id, "y" * 1_000_000)
        dumps.event(request, TextDelta("z" * 5_000))
        dumps.ended(request, Outcome(200, 1.0))
    files = sorted(path.name for path in (tmp_path / "dumps").rglob("*.json"))
    assert sum(path.stat().st_size for path in (tmp_path / "dumps").rglob("*.json")) <= 320_000
    assert files[-1] == "id-59.json" and "id-00.json" not in files
    told = json.loads(next((tmp_path / "dumps").rglob("id-59.json")).read_text())
    assert "characters left out" in told["prompt"][0] and len(told["prompt"][0]) < 11_000


def test_two_prompts_of_one_request_and_an_id_that_is_a_path(tmp_path: Path) -> None:
    request = ChatRequest("../../etc/x", "completions", "m")
    dumps = Dumps(tmp_path, Redactor())
    dumps.started(request)
    dumps.prompt(request.id, "one")
    dumps.prompt(request.id, "two")
    dumps.prompt("of nobody", "three")
    dumps.ended(request, Outcome(499, 1.0))
    assert read(tmp_path)["prompt"] == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]


@pytest.mark.parametrize(
    "text",
    [
        f"export OPENAI_API_KEY={KEY}",
        "Authorization: Bearer abcdefgh12345678",
        '"password": "correct-horse"',
        "github_pat_" + "A1" * 20,
        "ghp_" + "A1" * 18,
        "AKIA" + "A1B2" * 4,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijkl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "db_password = 'swordfish!'",
    ],
)
def test_what_looks_like_a_key_is_hidden(text: str) -> None:
    secret = text.rsplit(" ", 1)[-1].strip("\"'") if "PRIVATE" not in text else "MIIE"
    secret = secret.partition("=")[2] or secret
    said = Redactor().text(f"a {text} b")
    assert HIDDEN in said and secret not in said and said.startswith("a ") and said.endswith(" b")


@pytest.mark.parametrize(
    "text", ["task-abcdefghijklmnopqrstuvwx", "max_tokens: 1638400000", "def password(self): ...", "the secret is out"]
)
def test_ordinary_words_stay(text: str) -> None:
    assert Redactor(["ab", "", None]).text(text) == text


@pytest.mark.parametrize("text", ["a-" * 300_000, "eyJ" * 200_000, "-eyJ." * 100_000, "sk-" * 200_000, "x" * 600_000])
def test_redacting_hostile_text_takes_no_time(text: str) -> None:
    began = time.process_time()
    Redactor(["known-key"]).text(text)
    assert time.process_time() - began < 20
