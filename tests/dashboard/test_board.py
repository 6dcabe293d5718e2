"""What the page is told of requests, and what its charts are drawn from."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import Progress, Started, TextDelta, Usage
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AuditEntry
from start_llm.dashboard.board import KEPT, Board
from start_llm.dashboard.history import DAY, HOUR, MOST_CLIENTS, OTHERS, History
from start_llm.dashboard.observer import Activity, Outcome
from start_llm.dashboard.request_log import RequestLog
from tests.clock import Clock

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
