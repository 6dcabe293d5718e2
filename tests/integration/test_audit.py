"""What a real server writes down of a request: a row, a dump, counters."""

from __future__ import annotations

import json

from start_llm.dashboard.audit import AUDIT_FILE, Wanted, entries
from start_llm.dashboard.metrics import COUNTERS, GAUGES
from tests.integration.live import Start

KEY = "sk-" + "a1B2" * 8


def test_a_request_leaves_a_row_a_dump_and_counters(start: Start) -> None:
    told = [{"role": "user", "content": f"Say hello to {KEY}."}]
    with start(dump_requests=True, kv_disk_dir="auto") as server:
        answer = server.chat(told, max_tokens=8)
        body = {"model": "default", "prompt": ["one two", "three"], "max_tokens": 2}
        headers = {"User-Agent": "my-agent/1.0"}
        assert server.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert server.post("/v1/completions", json=body | {"model": "x"}).status_code == 404
        half = {"metadata": {"user_id": '{"session_id": "half\\ud83d"}'}}
        assert server.chat(told, max_tokens=8, **half)["headers"]
        unknown = server.app._server.metrics.figures().keys() - GAUGES.keys() - COUNTERS.keys()
    assert not unknown, "each figure is a gauge or a counter, with a help text"
    first, second, third, fourth = entries(server.cache / AUDIT_FILE, Wanted(), 10)
    report = answer["report"]
    assert (first.id, first.outcome, first.model) == (answer["body"]["id"], "answered", "plain")
    assert (first.prompt, first.computed, first.new) == (report["prompt"], report["computed"], report["new"])
    assert answer["body"]["model"] == "plain"
    assert second.client == "my-agent" and second.outcome == "answered"
    assert (third.outcome, third.status, third.model) == ("refused", 404, "x")
    assert fourth.session == "half\ufffd", "no database takes half a character"
    dumps = {path.stem: json.loads(path.read_text()) for path in (server.cache / "logs" / "dumps").rglob("*.json")}
    dump = dumps[first.id]
    assert "Say hello to [redacted]." in dump["prompt"][0] and dump["sent"][0]["content"] == "Say hello to [redacted]."
    assert dump["answer"][0]["text"] == (answer["message"]["content"] or "")
    assert dumps[second.id]["prompt"] == ["one two", "three"]
    assert not any(KEY in path.read_text() for path in (server.cache / "logs").rglob("*.json*"))
    (server_log,) = (server.cache / "logs").rglob("server.jsonl")
    assert json.loads(server_log.read_text())["model"] == "plain"
