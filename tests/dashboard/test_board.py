"""What the page is told of requests, what its charts are drawn from, what is kept of them: rows, dumps without keys."""

from __future__ import annotations

import json
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.cli.commands import COMMANDS
from start_llm.core.events import Progress, ReasoningDelta, Started, TextDelta, ToolCallFinished, Usage
from start_llm.core.messages import Message, ToolCall
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest
from start_llm.dashboard import audit
from start_llm.dashboard.audit import GROUPS, OUTCOMES, Audit, AuditEntry, Wanted, entries, entry, sums
from start_llm.dashboard.board import KEPT, Board
from start_llm.dashboard.history import DAY, HOUR, MOST_CLIENTS, OTHERS, History
from start_llm.dashboard.observer import Activity, Outcome
from start_llm.dashboard.process_log import HIDDEN, Redactor
from start_llm.dashboard.request_log import Dumps, RequestLog
from tests.clock import Clock
from tests.memory_folder import memory_folder

REPORT = CacheReport(prompt=1000, reused=400, computed=600, new=600)


def request(name: str = "a", **more) -> ChatRequest:
    return ChatRequest(name, "chat", "m", **more)


def everything(_: str) -> bool:
    return True


def board_at(clock: Clock) -> Board:
    return Board(RequestLog(None), clock)


def end(board: Board, ended: ChatRequest, outcome: Outcome) -> None:
    """As a server tells it: the log first."""
    for observer in (board._log, board):
        observer.ended(ended, outcome)


def test_a_request_is_seen_waiting_reading_and_answering():
    clock = Clock()
    board = board_at(clock)
    board.started(request(session="s"))
    clock.now += 2
    (row,) = board.sight(0, everything).now
    assert (row["state"], row["seconds"], row["rate"], row["session"]) == ("queued", 2.0, 0.0, "s")
    board.event(request(), Started(REPORT))
    clock.now += 1
    board.event(request(), Progress(500, 1000))
    (row,) = board.sight(0, everything).now
    assert (row["state"], row["done"], row["total"], row["reused"]) == ("prefill", 500, 1000, 400)
    assert (row["rate"], row["left"]) == (100.0, 5.0)
    board.event(request(), TextDelta("a"))
    board.event(request(), TextDelta("b"))
    clock.now += 1
    (row,) = board.sight(0, everything).now
    assert (row["state"], row["pieces"], row["rate"], row["left"]) == ("answer", 2, 2.0, None)


def test_ended_requests_are_told_once_and_only_to_who_may_see_them():
    board = board_at(Clock())
    for name in "ab":
        board.started(request(name))
        end(board, request(name), Outcome(200, 1.0, 0.5, report=REPORT))
    sight = board.sight(0, everything)
    assert sight.now == [] and [entry["id"] for entry in sight.ended] == ["a", "b"]
    assert sight.ended[0]["computed"] == 600
    assert board.sight(sight.last, everything).ended == []
    assert [entry["id"] for entry in board.sight(0, lambda name: name == "b").ended] == ["b"]
    board.started(request("c"))
    assert board.sight(0, lambda name: name == "b").now == []


def test_only_the_last_ones_are_kept():
    board = board_at(Clock())
    for count in range(KEPT + 5):
        end(board, request(str(count)), Outcome(200, 1.0))
    sight = board.sight(0, everything)
    assert len(sight.ended) == KEPT and sight.ended[-1]["id"] == str(KEPT + 4) and sight.last == KEPT + 5


def test_who_waits_is_woken_by_news():
    board = board_at(Clock())
    version = board.sight(0, everything).version
    woken = threading.Event()

    def wait() -> None:
        board.wait(version, 30)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not woken.is_set()
    board.started(request())
    assert woken.wait(60)
    thread.join(60)
    board.wait(version, 30)  # something has happened already: returns at once


ANY = cast(Any, None)


def test_idle_is_the_time_since_the_last_request_has_ended() -> None:
    activity = Activity(clock := Clock(10.0))
    clock.now = 13.0
    assert activity.idle_seconds() == 3.0
    activity.started(ANY)
    activity.started(ANY)
    activity.ended(ANY, ANY)
    clock.now = 20.0
    assert activity.idle_seconds() == 0.0
    activity.ended(ANY, ANY)
    clock.now = 25.0
    assert activity.idle_seconds() == 5.0


REQUEST = ChatRequest("a", "chat", "m", client="pi", stream=True)
SLOT_SECONDS, SLOTS = DAY
NOON = time.mktime((2026, 11, 21, 12, 0, 30, 0, 0, -1))


def outcome(reused: int = 900, computed: int = 100, **more: Any) -> Outcome:
    report = CacheReport(prompt=reused + computed, reused=reused, computed=computed, seconds_prefill=0.5)
    usage = Usage(prompt=reused + computed, completion=40, cached=reused)
    return Outcome(200, 3.0, seconds_first=1.0, usage=usage, report=report, **more)


def history(clock: Clock) -> History:
    return History(lambda: 5e9, clock)


def test_a_request_counts_in_both_series() -> None:
    seen = history(Clock(NOON))
    seen.ended(REQUEST, outcome())
    seen.ended(REQUEST, outcome())
    told = seen.as_dict()
    for name, (seconds, count) in {"hour": HOUR, "day": DAY}.items():
        series = told[name]
        assert (series["seconds"], series["count"]) == (seconds, count)
        assert series["begin"] == int(NOON) // seconds * seconds - (count - 1) * seconds
        # requests, reused, computed, answered, seconds of that, firsts, seconds to them, memory, again
        assert series["points"] == [[count - 1, 2, 1800, 200, 80, 4.0, 2, 2.0, 5e9, 200]]


def test_what_is_sent_as_a_whole_tells_no_rate_of_its_answer() -> None:
    seen = history(Clock(NOON))
    seen.ended(ChatRequest("a", "chat", "m"), outcome())
    assert seen.as_dict()["hour"]["points"][0][4:6] == [0, 0.0]


def test_seconds_are_spared_by_the_prefill_that_was_measured() -> None:
    seen = history(Clock(NOON))
    assert (seen.as_dict()["spared"], seen.as_dict()["spared_seconds"]) == (0, None)
    seen.ended(REQUEST, outcome(reused=12_000, computed=100))  # 100 tokens in 0.5 s
    told = seen.as_dict()
    assert (told["spared"], told["spared_seconds"], told["prefill_rate"]) == (12_000, 60.0, 200.0)


def test_today_begins_at_midnight() -> None:
    clock = Clock(NOON - 12.5 * 3600)  # half an hour before midnight
    seen = history(clock)
    seen.ended(REQUEST, outcome(reused=7000))
    clock.now = NOON
    seen.ended(REQUEST, outcome(reused=300))
    told = seen.as_dict()
    assert told["spared"] == 300
    assert len(told["day"]["points"]) == 2 and len(told["hour"]["points"]) == 1


def test_it_begins_with_what_was_written_down() -> None:
    seen = history(Clock(NOON))

    def written(when: float, prompt: int) -> AuditEntry:
        names = ("id", "pi", "session", "chat", "m", "answered")
        return AuditEntry(prompt, 60, 40, 30, 5, 1.0, None, when, *names, 200, "")

    seen.begin_with([written(NOON - 8 * SLOT_SECONDS, 100), written(NOON, 0)])
    told = seen.as_dict()
    assert [place for place, *_ in told["hour"]["points"]] == [HOUR[1] - 1]
    assert told["day"]["points"][0][1:4] == [1, 60, 40]
    assert told["spared"] == 120 and told["spared_seconds"] is None, "how quick a prefill is was not written down"
    answered(seen, "pi", prompt=5, computed=5, new=5)
    (pi,) = seen.day()["clients"]
    assert pi["slots"] == [[SLOTS - 9, 1, 60, 30, 10], [SLOTS - 1, 1, 0, 5, 0]]


@given(st.lists(st.floats(-40 * 3600, 40 * 3600), max_size=60))
def test_it_is_bounded_whenever_requests_end(moments: list[float]) -> None:
    clock = Clock(NOON)
    seen = history(clock)
    for moment in moments:  # the machine's clock may be set back
        clock.now = NOON + moment
        seen.ended(REQUEST, outcome())
    told = seen.as_dict()
    for name in ("hour", "day"):
        points = told[name]["points"]
        places = [point[0] for point in points]
        assert len(points) <= told[name]["count"] and places == sorted(set(places))
        assert all(place >= 0 for place in places)


# --- reuse by client over a day ---


def answered(daily: History, client: str, **counts: int) -> None:
    daily.ended(ChatRequest("id", "chat", "m", client=client), Outcome(200, 1.0, report=CacheReport(**counts)))


def test_tokens_are_counted_by_client_and_quarter() -> None:
    clock = Clock(1_000_000.0)
    daily = history(clock)
    answered(daily, "pi", prompt=100, reused=60, computed=40, new=30)
    answered(daily, "pi", prompt=100, reused=90, computed=10, new=10)
    clock.now += SLOT_SECONDS
    answered(daily, "pi", prompt=7, computed=7, new=7)
    answered(daily, "", prompt=1000, computed=1000, new=1000)
    busy, pi = daily.day()["clients"]
    assert (busy["name"], busy["slots"]) == ("other", [[SLOTS - 1, 1, 0, 1000, 0]])
    assert pi == {"name": "pi", "slots": [[SLOTS - 2, 2, 150, 40, 10], [SLOTS - 1, 1, 0, 7, 0]]}


def test_what_is_older_than_a_day_is_forgotten_and_failures_do_not_count() -> None:
    clock = Clock(1_000_000.0)
    daily = history(clock)
    answered(daily, "pi", prompt=10, computed=10, new=10)
    daily.ended(ChatRequest("id", "chat", "m"), Outcome(400, 1.0))
    clock.now += SLOTS * SLOT_SECONDS
    assert daily.day()["clients"] == []


def test_clients_are_bounded() -> None:
    daily = history(Clock(1_000_000.0))
    for number in range(MOST_CLIENTS + 9):
        answered(daily, f"agent-{number}", prompt=10 + number, computed=10, new=10)
    clients = {client["name"]: client for client in daily.day()["clients"]}
    assert len(clients) == MOST_CLIENTS + 1 and clients[OTHERS]["slots"][0][1] == 9


def test_clients_of_yesterday_take_no_place_from_those_of_today() -> None:
    """Also where nobody has looked at the page meanwhile."""
    clock = Clock(1_000_000.0)
    daily = history(clock)
    for number in range(MOST_CLIENTS):
        answered(daily, f"agent-{number}", prompt=10, computed=10, new=10)
    clock.now += SLOTS * SLOT_SECONDS
    answered(daily, "pi", prompt=10, computed=10, new=10)
    assert [client["name"] for client in daily.day()["clients"]] == ["pi"]


MISSED = CacheReport(
    prompt=1200, reused=1000, computed=200, new=150, miss=Miss("diverged", 1000, "secret words", "secret words")
)
ROW = ChatRequest("chatcmpl-abc", "chat", "m", session="s", client="pi")
GOOD = Outcome(200, 2.5, 0.5, Usage(1200, 30, 1000), MISSED)
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
    write(path, (ROW, GOOD), (replace(ROW, id="b", client="aider"), GONE))
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
    assert entry(ROW, Outcome(status, 1.0, report=report), NOW).outcome == said and said in OUTCOMES


def test_what_is_wanted(path: Path) -> None:
    other = replace(ROW, id="o", client="aider", model="n")
    write(path, (ROW, GOOD), (other, GOOD), (other, GONE))
    write(path, (ROW, GOOD), now=NOW + 100)
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
    write(path, (ROW, GOOD), now=NOW - 3 * 86_400)
    write(path, (ROW, GOOD), now=NOW, days=2)
    assert [each.time for each in entries(path, Wanted(), 10)] == [NOW]
    monkeypatch.setattr(audit, "MOST_ROWS", 2)
    for later in range(1, 4):
        write(path, (ROW, GOOD), now=NOW + later)
    assert [each.time for each in entries(path, Wanted(), 10)] == [NOW + 2, NOW + 3]


def test_a_file_that_is_not_there_is_not_made(path: Path) -> None:
    assert entries(path, Wanted(), 10) == [] and sums(path, Wanted(), "day") == []
    assert not path.exists()


def test_a_damaged_file_is_begun_anew(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    write(path, (ROW, GOOD))
    assert len(entries(path, Wanted(), 10)) == 1


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "file" / "audit.sqlite3", (ROW, GOOD))
    assert (tmp_path / "file").read_bytes() == b""


def test_two_servers_share_a_file(path: Path) -> None:
    one, other = Audit(path, 30), Audit(path, 30)
    for number in range(20):
        (one, other)[number % 2].ended(replace(ROW, id=str(number)), GOOD)
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
