"""The score on recorded sessions: on a small invented recording, whose optimum is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_sessions as bench

# [t, agent, in, out, think, api, keep, new]: a session that grows, and a sub-agent that shares its beginning.
GROWS = [
    [0.0, "main", 600, 50, 0, 1, 0, list(range(1, 11))],
    [20.0, "main", 900, 50, 5, 1, 9, list(range(11, 17))],
    [25.0, "sub", 300, 50, 0, 1, 0, [1, 2, 3, 4, 90]],
    [60.0, "main", 960, 50, 5, 1, 15, []],
    [90.0, "main", 400, 50, 5, 1, 4, [70, 71, 72]],
]


def recording(name: str, shift: float = 0.0) -> dict[str, Any]:
    requests = [[t + shift, *rest] for t, *rest in GROWS]
    return {"id": name, "block": 64, "tools": 100, "system": 28, "requests": requests}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl.gz"
    lines = [json.dumps(recording(name, shift)) for name, shift in (("a", 0.0), ("b", 3.0), ("c", 7.0))]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def scores(path: Path, *options: str) -> dict[str, bench.Score]:
    given = bench.arguments([str(path), *options])
    requests = bench.timeline(bench.read_sessions([path]), given.at_once[0])
    device = bench.Device(given.prefill, given.disk_speed, given.token_bytes)
    return {score.policy: score for score in bench.scores(requests, given.budgets[0], device, given)}


def test_a_timeline_knows_what_was_sent_before(path: Path) -> None:
    requests = bench.timeline(bench.read_sessions([path]), at_once=1)
    first = [request for request in requests if request.session == 0]
    assert [len(request.tokens) for request in first] == [600, 900, 300, 960, 400]
    assert [request.reusable for request in first] == [0, 576, 256, 900, 256]
    assert (first[3].tokens[:900] == first[1].tokens).all() and (first[2].tokens[:256] == first[0].tokens[:256]).all()
    assert not set(first[0].tokens) & {token for request in requests[5:] for token in request.tokens}
    assert [request.time for request in requests] == sorted(request.time for request in requests)


def test_with_all_kept_the_optimum_is_computed(path: Path) -> None:
    found = scores(path, "--at-once", "3", "--budgets", "0")
    assert found["start_llm"].optimum == 3 * (600 + 324 + 44 + 60 + 144)
    for name in ("start_llm", "start_llm + disk", "LRU, whole conversations"):
        assert found[name].computed == found[name].optimum, name
    assert found["knows the future"].computed <= found["start_llm"].optimum + 5 * 3 * 64
    assert found["start_llm + disk"].written == 3 * (600 + 324 + 44 + 60 + 144) * 65536
    assert found["LRU, blocks of 256"].excess["floor"] > 0


def test_what_a_budget_costs_is_told_by_cause(path: Path) -> None:
    found = scores(path, "--at-once", "3", "--budgets", "1500")
    assert found["start_llm"].excess["evicted"] > 0 and found["start_llm"].computed > found["start_llm"].optimum
    assert found["knows the future"].computed <= found["LRU, blocks of a tree"].computed
    paged = found["start_llm + disk"]
    assert paged.from_disk > 0 and paged.computed == paged.optimum
    assert sum(found["start_llm"].waits) > sum(paged.waits)


def test_rows_are_lent_as_the_engine_lends_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running row is not evicted and has spare room, which a copy of it would not tell."""
    lent = []

    class Watched(bench.KVStore):
        def put(self, tokens: Any, cache: Any, about: Any) -> None:
            super().put(tokens, cache, about)
            lent.append(self.lent_rows.nbytes)

    monkeypatch.setattr(bench, "KVStore", Watched)
    scores(path, "--hybrid", "--budgets", "1500", "--no-baselines", "--no-disk")
    assert len(lent) > 15 and min(lent) > 0


def test_a_hybrid_is_restored_where_a_state_was_kept(path: Path) -> None:
    found = scores(path, "--hybrid", "--budgets", "0", "--no-baselines", "--no-disk")
    score = found["start_llm"]
    assert score.computed - score.optimum == sum(score.excess.values()) > 0
    assert score.from_memory > 0


def test_the_one_that_knows_the_future_keeps_a_state_for_each_prompt_to_come(path: Path) -> None:
    requests = bench.timeline(bench.read_sessions([path]), at_once=3)
    device = bench.Device(600.0, 3e9, 65536)

    def computed(budget: int, state_tokens: int) -> int:
        return bench.replay_oracle(requests, budget, device, 64, state_tokens).computed

    assert computed(0, 128) == computed(0, 0)
    # States that fit beside all KV cost nothing.
    assert computed(4096 + 6 * 128, 128) == computed(4096, 0)
    few = [computed(1500, state) for state in (0, 64, 128, 256)]
    assert few == sorted(few) and few[0] < few[-1]


def test_states_stand_where_recorded_prompts_part(tmp_path: Path) -> None:
    """Recorded are whole blocks. The first prompt ends one token behind a block, so its last message ends inside of the
    last recorded one, and the second prompt parts there. The sub-agent parts inside the block where the head ends."""
    begin, far = list(range(1, 41)), list(range(101, 121))
    requests = [
        [0.0, "main", 40 * 64 + 1, 50, 0, 1, 0, begin],
        [20.0, "main", 60 * 64 + 30, 50, 5, 1, 39, [*far, 122]],
        [25.0, "sub", 30 * 64 + 5, 50, 0, 1, 0, [*begin[:20], *range(201, 211)]],
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps({"id": "a", "block": 64, "tools": 1000, "system": 290, "requests": requests}))
    score = scores(path, "--hybrid", "--budgets", "0", "--no-baselines", "--no-disk")["start_llm"]
    assert score.computed == score.optimum


def test_the_next_turns_after_a_restart_come_from_disk(path: Path) -> None:
    for kind in ((), ("--hybrid", "--state-tokens", "8")):
        found = scores(path, "--at-once", "3", "--budgets", "0", "--no-baselines", "--restart", *kind)
        resumed = found["next turns after a restart"]
        assert 3 <= len(resumed.waits) <= 6 and resumed.from_disk > 0
        assert kind or resumed.computed == resumed.optimum
        assert found["start_llm + disk"].computed == found["start_llm"].computed


def test_files_of_kv_cache_tester_are_read(tmp_path: Path) -> None:
    inner = {"t": 0.0, "type": "s", "in": 300, "hash_ids": [1, 2, 3, 4, 90]}
    data = {"id": "a", "block_size": 64, "tool_tokens": 100, "system_tokens": 28}
    data["requests"] = [
        {"t": 0.0, "type": "s", "in": 600, "hash_ids": list(range(1, 11)), "stop": "tool_use"},
        {"t": 20.0, "type": "n", "in": 900, "hash_ids": [*range(1, 10), *range(11, 17)], "stop": "end_turn"},
        {"t": 25.0, "type": "subagent", "requests": [inner]},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data, indent=1))
    (theirs,) = bench.read_sessions([path])
    ours = bench.Session.parse({**recording("a"), "requests": GROWS[:3]})
    assert [(t.time, t.tokens, t.blocks) for t in theirs.turns] == [(t.time, t.tokens, t.blocks) for t in ours.turns]
    assert [turn.calls for turn in theirs.turns] == [True, False, None]
    assert [request.calls for request in bench.timeline([theirs], 1)] == [True, False, None]
    assert theirs.head == ours.head == 128 and len({turn.agent for turn in theirs.turns}) == 2


def test_the_table_is_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(path), "--at-once", "2", "--budgets", "1500", "0", "--most", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 sessions, 10 requests, 2 at once, plain, 1,500 tokens" in printed and "no limit" in printed
