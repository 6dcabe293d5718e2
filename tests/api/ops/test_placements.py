"""What a node says of conversations that proxies have placed, and when it refuses one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from start_llm.api.ops.placements import ACTIVE_SECONDS, MOST_PLACED, PlacementBody, Placements
from start_llm.api.server import ApiServer
from tests.api.conftest import Raw

Connect = Callable[[ApiServer], Raw]
PATH = "/v1/cache/placements"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def body(*names: str, opening: str | None = "s", place: bool = False, revision: int | None = None) -> PlacementBody:
    return PlacementBody(conversation=list(names), opening=opening, place=place, revision=revision)


def test_a_question_changes_nothing() -> None:
    placements = Placements(Clock())
    for _ in range(2):
        found = placements.ask(body("c"))
        assert (found.known, found.opening_seconds, found.conversations, found.revision) == (None, None, 0, 0)


def test_a_conversation_is_known_by_its_surest_name() -> None:
    clock = Clock()
    placements = Placements(clock)
    assert placements.ask(body("c", "name", place=True)).placed
    clock.now += 5
    found = placements.ask(body("agent", "name"))
    assert (found.known, found.known_seconds, found.opening_seconds, found.conversations) == (1, 5.0, 5.0, 1)
    assert placements.ask(body("c", "name")).known == 0
    assert placements.ask(body("other", opening="else")).opening_seconds is None


def test_who_has_decided_by_an_old_answer_is_refused() -> None:
    """Of two proxies that found the node empty, one places its conversation."""
    placements = Placements(Clock())
    seen = placements.ask(body("one")).revision
    assert placements.ask(body("two", place=True, revision=seen)).placed
    refused = placements.ask(body("one", place=True, revision=seen))
    assert not refused.placed and refused.revision == seen + 1 and placements.ask(body("one")).known is None
    assert placements.ask(body("one", place=True, revision=refused.revision)).placed
    assert placements.ask(body("three", place=True)).placed, "without a revision it is placed in any case"


def test_conversations_of_the_last_hour_count_and_once() -> None:
    clock = Clock()
    placements = Placements(clock)
    for name in ("a", "b", "a"):
        placements.ask(body(name, place=True))
    assert placements.ask(body("c")).conversations == 2
    clock.now += ACTIVE_SECONDS - 1
    placements.ask(body("b", place=True))
    clock.now += 2
    found = placements.ask(body("a"))
    assert found.conversations == 1 and found.known == 0, "it still lives here"


def test_what_is_kept_is_bounded() -> None:
    placements = Placements(Clock())
    for number in range(MOST_PLACED + 10):
        placements.ask(body(f"c{number}", opening=f"s{number}", place=True))
    assert placements.ask(body("c0")).known is None and placements.ask(body("x")).conversations == MOST_PLACED


def test_over_http(server: ApiServer, connect: Connect) -> None:
    def ask(given: Any) -> tuple[int, dict[str, Any]]:
        status, _, answer = connect(server).post(PATH, given).response()
        return status, json.loads(answer)

    status, found = ask({"conversation": ["c"], "opening": "s", "place": True})
    assert status == 200 and found["placed"] and (found["running"], found["queued"]) == (1, 2)
    assert ask({"conversation": ["c"]})[1]["known"] == 0
    for wrong in ({}, {"conversation": "c"}, {"conversation": ["x" * 65]}, {"conversation": ["c"], "revision": "1"}):
        status, found = ask(wrong)
        assert status == 400 and ("conversation" in str(found) or "revision" in str(found))
