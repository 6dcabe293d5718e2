"""What the page's charts are drawn from: bounded, by minute and by quarter of an hour, and the tokens spared today."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import Usage
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AuditEntry
from start_llm.dashboard.history import DAY, HOUR, MOST_CLIENTS, OTHERS, History
from start_llm.dashboard.observer import Outcome
from tests.clock import Clock

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
    end(seen, "pi", prompt=5, computed=5, new=5)
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


def end(daily: History, client: str, **counts: int) -> None:
    daily.ended(ChatRequest("id", "chat", "m", client=client), Outcome(200, 1.0, report=CacheReport(**counts)))


def test_tokens_are_counted_by_client_and_quarter() -> None:
    clock = Clock(1_000_000.0)
    daily = history(clock)
    end(daily, "pi", prompt=100, reused=60, computed=40, new=30)
    end(daily, "pi", prompt=100, reused=90, computed=10, new=10)
    clock.now += SLOT_SECONDS
    end(daily, "pi", prompt=7, computed=7, new=7)
    end(daily, "", prompt=1000, computed=1000, new=1000)
    busy, pi = daily.day()["clients"]
    assert (busy["name"], busy["slots"]) == ("other", [[SLOTS - 1, 1, 0, 1000, 0]])
    assert pi == {"name": "pi", "slots": [[SLOTS - 2, 2, 150, 40, 10], [SLOTS - 1, 1, 0, 7, 0]]}


def test_what_is_older_than_a_day_is_forgotten_and_failures_do_not_count() -> None:
    clock = Clock(1_000_000.0)
    daily = history(clock)
    end(daily, "pi", prompt=10, computed=10, new=10)
    daily.ended(ChatRequest("id", "chat", "m"), Outcome(400, 1.0))
    clock.now += SLOTS * SLOT_SECONDS
    assert daily.day()["clients"] == []


def test_clients_are_bounded() -> None:
    daily = history(Clock(1_000_000.0))
    for number in range(MOST_CLIENTS + 9):
        end(daily, f"agent-{number}", prompt=10 + number, computed=10, new=10)
    clients = {client["name"]: client for client in daily.day()["clients"]}
    assert len(clients) == MOST_CLIENTS + 1 and clients[OTHERS]["slots"][0][1] == 9


def test_clients_of_yesterday_take_no_place_from_those_of_today() -> None:
    """Also where nobody has looked at the page meanwhile."""
    clock = Clock(1_000_000.0)
    daily = history(clock)
    for number in range(MOST_CLIENTS):
        end(daily, f"agent-{number}", prompt=10, computed=10, new=10)
    clock.now += SLOTS * SLOT_SECONDS
    end(daily, "pi", prompt=10, computed=10, new=10)
    assert [client["name"] for client in daily.day()["clients"]] == ["pi"]
