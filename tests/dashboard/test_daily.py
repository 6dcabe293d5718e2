"""Reuse by client over a day."""

from __future__ import annotations

from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AuditEntry
from start_llm.dashboard.history import DAY, MOST_CLIENTS, OTHERS, History
from start_llm.dashboard.observer import Outcome
from tests.clock import Clock

SLOT_SECONDS, SLOTS = DAY


def end(daily: History, client: str, **counts: int) -> None:
    daily.ended(ChatRequest("id", "chat", "m", client=client), Outcome(200, 1.0, report=CacheReport(**counts)))


def test_tokens_are_counted_by_client_and_quarter() -> None:
    clock = Clock(1_000_000.0)
    daily = History(lambda: 0.0, clock)
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
    daily = History(lambda: 0.0, clock)
    end(daily, "pi", prompt=10, computed=10, new=10)
    daily.ended(ChatRequest("id", "chat", "m"), Outcome(400, 1.0))
    clock.now += SLOTS * SLOT_SECONDS
    assert daily.day()["clients"] == []


def test_it_begins_with_what_was_written_down() -> None:
    clock = Clock(1_000_000.0)
    daily = History(lambda: 0.0, clock)

    def written(when: float, prompt: int) -> AuditEntry:
        names = ("id", "pi", "session", "chat", "m", "answered")
        return AuditEntry(prompt, 60, 40, 30, 5, 1.0, None, when, *names, 200, "")

    daily.begin_with([written(clock.now - SLOT_SECONDS, 100), written(clock.now, 0)])
    end(daily, "pi", prompt=5, computed=5, new=5)
    (pi,) = daily.day()["clients"]
    assert pi["slots"] == [[SLOTS - 2, 1, 60, 30, 10], [SLOTS - 1, 1, 0, 5, 0]]


def test_clients_are_bounded() -> None:
    daily = History(lambda: 0.0, Clock(1_000_000.0))
    for number in range(MOST_CLIENTS + 9):
        end(daily, f"agent-{number}", prompt=10 + number, computed=10, new=10)
    clients = {client["name"]: client for client in daily.day()["clients"]}
    assert len(clients) == MOST_CLIENTS + 1 and clients[OTHERS]["slots"][0][1] == 9


def test_clients_of_yesterday_take_no_place_from_those_of_today() -> None:
    """Also where nobody has looked at the page meanwhile."""
    clock = Clock(1_000_000.0)
    daily = History(lambda: 0.0, clock)
    for number in range(MOST_CLIENTS):
        end(daily, f"agent-{number}", prompt=10, computed=10, new=10)
    clock.now += SLOTS * SLOT_SECONDS
    end(daily, "pi", prompt=10, computed=10, new=10)
    assert [client["name"] for client in daily.day()["clients"]] == ["pi"]
