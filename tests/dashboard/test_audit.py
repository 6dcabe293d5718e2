"""What is kept of requests: rows of the audit, dumps without keys."""

from __future__ import annotations

import json
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.cli.commands import COMMANDS
from start_llm.core.events import ReasoningDelta, TextDelta, ToolCallFinished, Usage
from start_llm.core.messages import Message, ToolCall
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest
from start_llm.dashboard import audit
from start_llm.dashboard.audit import GROUPS, OUTCOMES, Audit, Wanted, entries, entry, sums
from start_llm.dashboard.observer import Outcome
from start_llm.dashboard.process_log import HIDDEN, Redactor
from start_llm.dashboard.request_log import Dumps
from tests.memory_folder import memory_folder

REPORT = CacheReport(
    prompt=1200, reused=1000, computed=200, new=150, miss=Miss("diverged", 1000, "secret words", "secret words")
)
REQUEST = ChatRequest("chatcmpl-abc", "chat", "m", session="s", client="pi")
GOOD = Outcome(200, 2.5, 0.5, Usage(1200, 30, 1000), REPORT)
GONE = Outcome(499, 1.0, error="The client went away.")
NOW = 1_800_000_000.0


@pytest.fixture
def path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder / "audit.sqlite3"


def write(path: Path, *rows: tuple[ChatRequest, Outcome], now: float = NOW, days: float = 30) -> None:
    table = Audit(path, days, clock=lambda: now)
    for request, outcome in rows:
        table.ended(request, outcome)
    table.close()
    table.close()


def test_a_row_says_who_what_and_how_but_no_words(path: Path) -> None:
    write(path, (REQUEST, GOOD), (replace(REQUEST, id="b", client="aider"), GONE))
    first, second = entries(path, Wanted(), 10)
    assert (first.time, first.client, first.model, first.session, first.outcome) == (NOW, "pi", "m", "s", "answered")
    assert (first.prompt, first.reused, first.computed, first.new, first.answer) == (1200, 1000, 200, 150, 30)
    assert (first.seconds, first.seconds_first, first.miss) == (2.5, 0.5, "diverged")
    assert (second.id, second.outcome, second.status, second.seconds_first) == ("b", "gone", 499, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"secret words" not in path.read_bytes() and b"went away" not in path.read_bytes()


@pytest.mark.parametrize(
    ("status", "report", "said"),
    [
        (200, CacheReport(), "answered"),
        (200, CacheReport(cut="watchdog"), "cut"),
        (404, None, "refused"),
        (499, None, "gone"),
        (503, None, "failed"),
    ],
)
def test_outcomes(status: int, report: CacheReport | None, said: str) -> None:
    assert entry(REQUEST, Outcome(status, 1.0, report=report), NOW).outcome == said and said in OUTCOMES


def test_what_is_wanted(path: Path) -> None:
    other = replace(REQUEST, id="o", client="aider", model="n")
    write(path, (REQUEST, GOOD), (other, GOOD), (other, GONE))
    write(path, (REQUEST, GOOD), now=NOW + 100)
    assert len(entries(path, Wanted(), 10)) == 4
    assert [each.time for each in entries(path, Wanted(), 2)] == [NOW, NOW + 100]
    assert len(entries(path, Wanted(since=NOW + 1), 10)) == 1
    assert len(entries(path, Wanted(client="AIDER"), 10)) == 2
    assert len(entries(path, Wanted(model="n", outcome="gone"), 10)) == 1
    assert entries(path, Wanted(client="x' OR 1 --"), 10) == []
    by = {added.name: added for added in sums(path, Wanted(), "client")}
    assert (by["pi"].requests, by["pi"].reused, by["aider"].answered, by["aider"].seconds) == (2, 2000, 1, 1.75)
    for group in GROUPS:
        assert sum(added.requests for added in sums(path, Wanted(), group)) == 4


def test_old_rows_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, (REQUEST, GOOD), now=NOW - 3 * 86_400)
    write(path, (REQUEST, GOOD), now=NOW, days=2)
    assert [each.time for each in entries(path, Wanted(), 10)] == [NOW]
    monkeypatch.setattr(audit, "MOST_ROWS", 2)
    for later in range(1, 4):
        write(path, (REQUEST, GOOD), now=NOW + later)
    assert [each.time for each in entries(path, Wanted(), 10)] == [NOW + 2, NOW + 3]


def test_a_file_that_is_not_there_is_not_made(path: Path) -> None:
    assert entries(path, Wanted(), 10) == [] and sums(path, Wanted(), "day") == []
    assert not path.exists()


def test_a_damaged_file_is_begun_anew(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    write(path, (REQUEST, GOOD))
    assert len(entries(path, Wanted(), 10)) == 1


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "file" / "audit.sqlite3", (REQUEST, GOOD))
    assert (tmp_path / "file").read_bytes() == b""


def test_two_servers_share_a_file(path: Path) -> None:
    one, other = Audit(path, 30), Audit(path, 30)
    for number in range(20):
        (one, other)[number % 2].ended(replace(REQUEST, id=str(number)), GOOD)
    one.close()
    other.close()
    assert sorted(int(each.id) for each in entries(path, Wanted(since=time.time() - 600), 100)) == list(range(20))
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_command_line_allows_what_the_table_knows() -> None:
    choices = {flag["names"][0]: flag.get("choices") for flag in COMMANDS["audit"].flags}
    assert set(choices["--by"]) == set(GROUPS) and tuple(choices["--outcome"]) == OUTCOMES


KEY = "sk-" + "a1B2" * 8
ASKED = ChatRequest(
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
    dumps.started(ASKED)
    dumps.prompt(ASKED.id, f"<user>my key is {KEY}, hunter22")
    for event in (ReasoningDelta("hm"), TextDelta("it is sk-a1B2a1B2"), TextDelta("a1B2a1B2a1B2"), TextDelta(".")):
        dumps.event(ASKED, event)
    dumps.event(ASKED, ToolCallFinished(0, "1", "bash", '{"x": 1}'))
    dumps.ended(ASKED, Outcome(200, 1.0))
    told = read(tmp_path)
    assert told["id"] == ASKED.id and told["status"] == 200
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
