"""What the page is told of requests, and since when none runs."""

from __future__ import annotations

import threading
from typing import Any, cast

from start_llm.core.events import Progress, Started, TextDelta
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.dashboard.board import KEPT, Board
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
