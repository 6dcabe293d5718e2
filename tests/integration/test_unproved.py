"""A prompt that could have been reused and was not says so, where, and what would help: in all places."""

from __future__ import annotations

import json
from typing import Any

import httpx

from start_llm.cli import doctor
from start_llm.dashboard.audit import AUDIT_FILE, Wanted, entries, sums
from tests.integration.live import Start

REMEDY = "send session_id in all turns"


def asked(customer: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"You help.\nCustomer: {customer}\nBe brief."}, *turns]


def test_a_changed_name_is_shown_as_sent_and_told_as_unproved_everywhere(start: Start) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Tell me all. [[long 200]]"}]
    with start() as server:
        first = server.chat(asked("Alicia", turns))
        turns += [
            {"role": "assistant", "content": first["message"]["content"]},
            {"role": "user", "content": "And? [[truth]]"},
        ]
        body = {"model": "default", "messages": asked("Robert", turns)}
        explained = server.post("/v1/cache/explain", json=body)
        second = server.chat(body["messages"])
        requests = server.get("/v1/cache/requests").json()["requests"]
        one = server.get(f"/v1/cache/requests/{second['body']['id']}").json()
        with httpx.stream("GET", f"{server.url}/page/feed") as feed:
            line = next(line for line in feed.iter_lines() if line.startswith("data: "))
        page = json.loads(line.removeprefix("data: "))["ended"]
    counts = (f"{name}={first['report'][name]}" for name in ("prompt", "reused", "computed", "new"))
    assert first["headers"]["x-start-llm-cache"] == "; ".join(counts)
    reports = [explained.json(), second["report"], requests[0], one, page[-1]]
    for log in (server.cache / "logs").rglob("session-*.jsonl"):
        reports += [
            told for told in map(json.loads, log.read_text().splitlines()) if told["id"] == second["body"]["id"]
        ]
    assert len(reports) == 6
    for report in reports:
        miss = report["miss"]
        assert (miss["reason"], miss["field"], miss["message"], miss["remedy"]) == ("unproved", "system", 0, REMEDY)
        assert miss["detail"].startswith("line 2 differs")
    for header in (explained.headers["x-start-llm-cache"], second["headers"]["x-start-llm-cache"]):
        assert header.endswith(f'; miss=unproved; at=messages[0].system; remedy="{REMEDY}"')
    audit = server.cache / AUDIT_FILE
    assert entries(audit, Wanted(), 9)[-1].miss == f"unproved in messages[0].system: {REMEDY}"
    assert {each.name for each in sums(audit, Wanted(), "miss")} == {"", "unproved"}
    (finding,) = doctor.check_reuse(audit)
    assert "unproved" in finding.text and "session_id" in finding.text
