"""Metrics, logs and terminal lines, fed by hand."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from start_llm.core.events import FirstToken, Progress, Started, TextDelta, Usage
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.dashboard import progress
from start_llm.dashboard.metrics import COUNTERS, GAUGES, Metrics
from start_llm.dashboard.observer import Outcome
from start_llm.dashboard.process_log import KEPT, LINE_CHARS, JsonFormatter, LogTail, Redactor, json_line
from start_llm.dashboard.progress import ProgressLines
from start_llm.dashboard.request_log import RequestLog, session_name
from start_llm.dashboard.terminal import (
    JsonLines,
    LastingStream,
    LiveRows,
    RequestLine,
    TextLines,
    log_as_lines,
    make_console,
    span,
    terminal,
)
from tests.api.fakes import FakeService
from tests.clock import Clock

REPORT = CacheReport(prompt=1200, reused=1000, computed=200, new=150, miss=Miss("diverged", 1000, detail="the clock"))
REQUEST = ChatRequest("chatcmpl-abcdef123456", "chat", "m", session="ses/1")
GOOD = Outcome(200, 2.5, 0.5, Usage(1200, 30, 1000), REPORT)
GONE = Outcome(499, 1.0, error="The client went away.")


def test_metrics_count_requests_and_tokens() -> None:
    metrics = Metrics()
    metrics.started(REQUEST)
    assert "start_llm_requests_active 1.0" in metrics.text().decode()
    metrics.ended(REQUEST, GOOD)
    metrics.started(REQUEST)
    metrics.ended(REQUEST, GONE)
    text = metrics.text().decode()
    for line in (
        "start_llm_requests_active 0.0",
        'start_llm_requests_total{dialect="chat",status="200"} 1.0',
        'start_llm_requests_total{dialect="chat",status="499"} 1.0',
        'start_llm_tokens_total{kind="reused"} 1000.0',
        'start_llm_tokens_total{kind="generated"} 30.0',
        'start_llm_misses_total{reason="diverged"} 1.0',
        "start_llm_first_token_seconds_count 1.0",
    ):
        assert line in text.splitlines()


def test_figures_of_other_rooms_follow_prometheus_conventions() -> None:
    metrics = Metrics()
    metrics.watch_figures(lambda: {"kv_bytes": 7.0, "kv_errors": 2.0, "some_requests": 1.0})
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["start_llm_kv_bytes"] == "gauge" and families["start_llm_kv_bytes"].samples[0].value == 7.0
    text = metrics.text().decode()
    assert "# TYPE start_llm_kv_errors_total counter" in text and "start_llm_kv_errors_total 2.0" in text
    assert "# HELP start_llm_kv_errors Deprecated: start_llm_kv_errors_total." in text  # for one version
    assert "start_llm_some_requests_total 1.0" in text
    assert all(family.documentation for family in families.values())
    assert not GAUGES.keys() & COUNTERS.keys()


def test_routers_read_the_load_under_vllms_names() -> None:
    metrics = Metrics()
    metrics.watch(FakeService())
    metrics.watch_figures(lambda: {"kv_bytes": 30.0, "kv_budget_bytes": 120.0})
    metrics.started(REQUEST)
    metrics.ended(REQUEST, GOOD)
    lines = metrics.text().decode().splitlines()
    for name, value in (("num_requests_running", 1.0), ("num_requests_waiting", 2.0), ("kv_cache_usage_perc", 0.25)):
        assert f'vllm:{name}{{engine="0",model_name="tiny"}} {value}' in lines
    report = GOOD.report
    assert report is not None
    for name, tokens in (("queries", report.prompt), ("hits", report.reused)):
        label = f'{{engine="0",model_name="{REQUEST.model}"}}'
        assert f"vllm:prefix_cache_{name}_total{label} {float(tokens)}" in lines
    assert metrics.hit_rate() == report.reused / report.prompt


def test_log_lines_by_session_and_day(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, now=lambda: datetime(2026, 11, 21, 9, 0, tzinfo=UTC))
    log.ended(REQUEST, GOOD)
    log.ended(REQUEST, GONE)
    path = tmp_path / "2026-11-21" / f"session-{session_name('ses/1')}.jsonl"
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_mode & 0o077 == 0, "it is its owner's only"
    assert (first["id"], first["computed"], first["new"]) == (REQUEST.id, 200, 150)
    assert first["miss"]["detail"] == "the clock"
    assert (second["status"], second["error"]) == (499, "The client went away.")
    assert [entry["status"] for entry in log.recent()] == [499, 200]
    log.ended(REQUEST, Outcome(200, 1.0, report=CacheReport(session="found")))
    assert path.with_name(f"session-{session_name('found')}.jsonl").exists(), (
        "the session that was found names the file"
    )


def test_a_log_that_cannot_be_written_costs_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = RequestLog(tmp_path / "file")
    for _ in range(3):
        log.ended(REQUEST, GOOD)
    assert len(log.recent()) == 3
    assert caplog.text.count("cannot be logged") == 1
    (tmp_path / "file").unlink()
    log.ended(REQUEST, GOOD)
    assert "logged again" in caplog.text and len(list(tmp_path.glob("file/*/*.jsonl"))) == 1


@pytest.mark.parametrize(("one", "other"), [("a/b", "a.b"), (None, "none"), ("../../x", "x")])
def test_session_names_are_safe_and_differ(one: str | None, other: str) -> None:
    assert "/" not in session_name(one)
    assert ".." not in session_name(one)
    assert session_name(one) != session_name(other)


def test_counters_stand_in_the_log_at_the_start_and_with_each_request(tmp_path: Path) -> None:
    figures = {"kv_hits": 3.0, "kv_misses": 0.0}
    requests = RequestLog(tmp_path, counters=lambda: figures)
    requests.begin("a-model")
    figures["kv_hits"] = 4.0
    requests.ended(REQUEST, GOOD)
    (server,) = tmp_path.rglob("server.jsonl")
    begun = json.loads(server.read_text())
    assert (begun["event"], begun["model"], begun["counters"]) == ("ready", "a-model", {"kv_hits": 3.0})
    (session,) = tmp_path.rglob("session-*.jsonl")
    assert json.loads(session.read_text())["counters"] == {"kv_hits": 4.0}
    assert "counters" not in requests.recent()[0]  # what clients are told


ROW = ChatRequest("chatcmpl-000001", "chat", "m")
NAME = "chat        000001"


def test_a_row_tells_time_so_far_progress_rate_and_time_left() -> None:
    row = RequestLine(ROW, 0.0, 0.0)
    assert row.line(3.0) == f"{NAME}  3 s  waiting"
    row.see(Progress(0, 0), 3.0)
    assert row.state == "queued"
    row.see(Started(REPORT), 10.0)
    row.see(Progress(1100, 1200), 12.0)
    assert row.line(12.0) == f"{NAME}  12 s  prefill 1,100/1,200 (92%), 1,000 reused, 50 token/s, 2 s left"
    row.see(TextDelta("a"), 14.0)
    row.see(TextDelta("b"), 15.0)
    assert row.line(16.0) == f"{NAME}  16 s  answer 2 pieces, 1.0/s"


def test_an_answer_that_is_sent_as_a_whole_is_being_answered_from_its_first_token_on() -> None:
    row = RequestLine(ROW, 0.0, 0.0)
    row.see(Started(REPORT), 1.0)
    row.see(Progress(1200, 1200), 2.0)
    row.see(FirstToken(), 3.0)
    row.see(Progress(1200, 1200), 5.0)  # a sign of life
    assert (row.state, row.line(6.0)) == ("answer", f"{NAME}  6 s  answering since 3 s")


def test_times_are_told_in_minutes_and_hours() -> None:
    told = [span(seconds) for seconds in (-1, 59.4, 59.6, 754, 3725)]
    assert told == ["0 s", "59 s", "1:00 min", "12:34 min", "1:02:05 h"]


def test_plain_lines() -> None:
    lines: list[str] = []
    clock = Clock()
    plain = TextLines(lines.append, LiveRows(None), clock)
    plain.started(REQUEST)
    plain.event(REQUEST, Started(REPORT))
    for done in (1050, 1100, 1150):
        clock.now += 6
        plain.event(REQUEST, Progress(done, 1200))
    plain.ended(REQUEST, GOOD)
    plain.ended(REQUEST, GONE)
    assert lines[0].split()[2:5] == ["12", "s", "prefill"]
    assert [line.split()[2] for line in lines[1:]] == ["200", "499"]
    assert "computed 200, new 150, answer 30" in lines[1]
    assert lines[1].endswith("miss: the clock")


def test_a_terminal_has_a_row_for_each_request_that_runs_and_a_line_for_each_that_ended() -> None:
    stream, clock, said = io.StringIO(), Clock(), list[str]()
    console = Console(file=stream, force_terminal=True, width=120)
    rows, other = LiveRows(console), ChatRequest("msg_other1", "messages", "m")
    lines = terminal(Settings(_env_file=None), console, rows)  # type: ignore[call-arg]
    assert isinstance(lines, TextLines)
    lines._clock, lines._write, write = clock, said.append, lines._write
    lines.started(REQUEST)
    lines.event(REQUEST, Started(REPORT))
    lines.started(other)
    clock.now += 60.0
    lines.event(REQUEST, Progress(1100, 1200))
    assert rows._drawn is not None
    rows._drawn.refresh()
    shown = stream.getvalue()
    assert "prefill 1,100/1,200" in shown and "other1" in shown
    assert said == [], "no line is written for a prefill that is drawn"
    lines._write = write
    lines.ended(REQUEST, GOOD)
    assert rows._drawn is not None
    lines.ended(other, GONE)
    assert rows._drawn is None
    ends = [line for line in stream.getvalue().splitlines() if "  200  " in line or "  499  " in line]
    assert len(ends) == 2 and "reused 1,000" in ends[0] and ends[1].endswith("The client went away.")


@pytest.mark.parametrize("is_file", [False, True])
def test_log_lines_keep_clear_of_rows_and_move_no_cursor(monkeypatch: pytest.MonkeyPatch, is_file: bool) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    outside, inside = io.StringIO(), io.StringIO()
    outside.isatty = lambda: not is_file  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", outside)
    log_as_lines()
    rows = LiveRows(Console(file=inside, force_terminal=True, width=120))
    rows.show("a", lambda: "loading")
    logging.getLogger("disk").warning("nearly full")
    rows.show("a", None)
    line = "WARNING disk: nearly full\n"
    assert (line in inside.getvalue(), line in outside.getvalue()) == (not is_file, is_file)
    outside.truncate(0)
    outside.seek(0)
    logging.getLogger("disk").warning("full\x1b]52;c;aGk=\x07\x9b")
    assert outside.getvalue() == "WARNING disk: full]52;c;aGk=\n"


@pytest.mark.live
def test_a_reader_that_left_stops_nobody() -> None:
    code = (
        "from start_llm.dashboard.terminal import make_console\n"
        "console = make_console(stderr=False)\n"
        "for _ in range(3):\n"
        "    console.print('x' * 100_000)\n"
        "console.file.fileno(), console.encoding\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert (child.communicate()[1], child.returncode) == (b"", 0)


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        return True


def test_a_terminal_that_cannot_be_written_to_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LastingStream(Full())
    assert stream.write("abc") == 3
    stream.flush()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", Full())
    log_as_lines("debug")
    try:
        rows = LiveRows(Console(file=stream, force_terminal=True))  # type: ignore[arg-type]
        rows.show("a", lambda: "loading")
        logging.getLogger("start_llm").warning("said while rows are drawn")
        rows.close()
    finally:
        logging.getLogger("start_llm").setLevel(logging.NOTSET)


def test_a_file_gets_no_rows_and_no_keys_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    console = make_console(stderr=False)
    assert not console.is_terminal and not LiveRows(console).live


def test_signs_that_the_terminals_encoding_lacks_are_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    make_console(stderr=False).print("caf\xe9 \u5343 \u2026")
    sys.stdout.flush()
    assert written.getvalue() == b"caf\xe9 \\u5343 \\u2026\n"


def test_a_row_that_comes_while_the_terminal_is_given_back_does_not_stay() -> None:
    rows = LiveRows(Console(file=io.StringIO(), force_terminal=True))
    closing = threading.Thread(target=rows.close)

    class Slow(dict[str, Any]):
        def __setitem__(self, name: str, row: Any) -> None:
            closing.start()
            closing.join(0.2)  # it waits for this row
            super().__setitem__(name, row)

    rows._rows = Slow()
    rows.show("a", lambda: "loading")
    closing.join()
    assert rows._drawn is None


def test_the_terminal_decides() -> None:
    stream = io.StringIO()
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    console = Console(file=stream, force_terminal=True)
    observer = terminal(settings.model_copy(update={"log_json": True}), console, LiveRows(None))
    assert isinstance(observer, JsonLines)
    observer.ended(REQUEST, GOOD)
    assert json.loads(stream.getvalue())["reused"] == 1000


def test_a_step_is_told_when_it_begins_and_ends_and_in_between_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lines = ProgressLines(said.append, LiveRows(Console(file=io.StringIO())))
    for step, part in (("download [x]", 0.0), ("download [x]", 0.5), ("download [x]", 1.0), ("convert", 0.0)):
        lines(step, part)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines("convert", 0.25)
    lines("convert", -1.0)
    lines("convert", 0.0)
    assert said == [
        "download [x] ...", "download [x]: done (0 s)", "convert ...", "convert: 25%", "convert: failed (0 s)",
        "convert ...",
    ]  # fmt: skip


def test_a_terminal_has_bars_and_the_ends_as_lines() -> None:
    stream, said = io.StringIO(), list[str]()
    console = Console(file=stream, force_terminal=True, width=80)
    rows = LiveRows(console)
    lines = ProgressLines(said.append, rows)
    lines("download [x]\x1b]52;c;aGk=\x07", 0.0)
    lines("download [x]\x1b]52;c;aGk=\x07", 0.45)
    lines("loading y", 0.0)
    assert said == [] and rows._drawn is not None
    rows._drawn.refresh()
    assert "45% download [x]]52;c;aGk=" in stream.getvalue() and "0% loading y" in stream.getvalue()
    lines("download [x]\x1b]52;c;aGk=\x07", 1.0)
    assert len(said) == 1 and "\x1b" not in said[0] and rows._drawn is not None
    lines("loading y", -1.0)
    assert said[1] == "loading y: failed (0 s)" and rows._drawn is None
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"


def test_a_terminal_is_given_back_in_the_middle_of_a_step() -> None:
    said: list[str] = []
    rows = LiveRows(Console(file=io.StringIO(), force_terminal=True))
    lines = ProgressLines(said.append, rows)
    lines("loading y", 0.0)
    rows.close()
    lines("loading y", 0.5)
    lines("loading y", 1.0)
    assert rows._drawn is None and said[-1] == "loading y: done (0 s)"


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(term: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
    assert not LiveRows(console).live and not LiveRows(None).live


CRASHES = """
import logging, threading, warnings
from start_llm.dashboard.process_log import log_as_json
log_as_json("info")
for name in ("start_llm.x", "library"):
    logging.getLogger(name).info("said"), logging.getLogger(name).debug("no")
logging.getLogger("a").warning("two\\nlines")
warnings.warn("look out")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("gone")
"""


def test_a_line_is_one_object() -> None:
    entry = json.loads(json_line('a\n"b" \x1b é', level="error", extra=1))
    assert entry["message"] == 'a\n"b" \x1b é' and (entry["level"], entry["extra"]) == ("error", 1)
    assert "\n" not in json_line("a\nb") and entry["time"].endswith("+00:00")


def test_a_record_with_its_traceback() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("x.y", logging.WARNING, "f", 1, "it %s", ("failed",), sys.exc_info())
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "x.y", "it failed")
    assert entry["traceback"].endswith("ValueError: bad")


@pytest.mark.live
def test_warnings_and_crashes_are_lines_too() -> None:
    """The level is that of our own records."""
    run = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stdout == ""
    first, *said = [json.loads(line) for line in run.stderr.splitlines()]
    assert (first["logger"], first["level"], first["message"]) == ("start_llm.x", "info", "said")
    assert [entry["level"] for entry in said] == ["warning", "warning", "critical", "critical"]
    assert "look out" in said[1]["message"] and "ZeroDivisionError" in said[2]["message"]
    assert said[3]["traceback"].endswith("KeyError: 'gone'")


def test_only_the_last_lines_are_kept_and_they_are_numbered() -> None:
    tail = LogTail(Redactor().text)
    for number in range(KEPT + 3):
        tail.emit(logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "line %d", "args": (number,)}))
    lines, last = tail.after(0)
    assert len(lines) == KEPT and lines[0].endswith("line 3") and last == KEPT + 3
    assert tail.after(last - 1)[0] == lines[-1:]
    tail.emit(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    tail.emit(logging.makeLogRecord({"msg": "x" * 10_000}))
    lines, _ = tail.after(last)
    assert "%d" in lines[0] and len(lines[1]) == LINE_CHARS
