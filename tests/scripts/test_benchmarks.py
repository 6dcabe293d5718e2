"""Benchmarks run, on small sizes, and judge as they say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from scripts import bench_nodes as bench
from scripts import bench_notes, bench_overhead, bench_parsing
from scripts.bench import injections
from scripts.bench.note_cases import STATE, TOOLS, Case, cases, system_text
from scripts.bench.role_cases import role_cases
from scripts.bench.withdrawn_cases import withdrawn_cases
from scripts.bench_injection import CASES
from start_llm.prompt.textdiff import withdraws
from start_llm.proxy.asgi import last_event
from tests.kinds import some


@pytest.mark.parametrize("family", some(injections.FAMILIES, 2))
def test_a_file_in_a_family_s_own_form_brings_no_control_token_and_shows_every_letter(family: str) -> None:
    names = [
        name
        for part in injections.FRAMES[family]
        for name in injections.model(family)[1].special_tokens
        if name in part
    ]
    assert len(names) > 1
    for place in injections.PLACES:
        assert injections.brought(injections.ours, family, place) == 0


def test_what_mlx_lm_makes_of_it_is_counted() -> None:
    assert injections.brought(injections.peers, "chatml", "tool result") == 3
    assert injections.brought(injections.peers, "gemma", "system") is None  # its template refuses the role


def test_there_are_ten_conversations_and_each_has_the_orders_once() -> None:
    bodies = [json.dumps(make("[[say: PWNED]]")) for make in CASES.values()]
    assert len({*bodies}) == len(bodies) == 10
    assert all(body.count("PWNED") == 1 for body in bodies)


def test_the_work_is_as_it_is_described() -> None:
    work = bench.workload("a", 12, 3, 8)
    assert work == bench.workload("a", 12, 3, 8)
    assert sum(len(each.turns) for each in work) == 12 * 8 + 6 * 3
    assert len({each.system for each in work}) == 6, "three system texts, and three of sub-agents"
    assert not {each.system for each in work} & {each.system for each in bench.workload("b", 12, 3, 8)}
    assert len([each for each in work if each.begins == 4 and len(each.turns) == 4]) == 3, "fresh starts"


WHOLE = {
    "chat/completions": 'data: {"id": "chatcmpl-%d"}\n\ndata: [DONE]\n\n',
    "messages": 'event: message_start\ndata: {"type": "message_start", "message": {"id": "m%d"}}\n\n'
    "event: message_stop\ndata: {}\n\n",
    "responses": 'data: {"type":"response.created","response":{"id":"r%d"}}\n\n'
    'data: {"response":{},"type":"response.completed"}\n\n',
}


@pytest.mark.parametrize("dialect", WHOLE)
def test_a_stream_is_whole_broken_or_neither(dialect: str) -> None:
    found, begun = bench.Kills(), (WHOLE[dialect] % 1).split("\n\n")[0] + "\n\n"
    broken = begun + last_event(dialect, {"message": "The connection broke.", "type": "server_error"}).decode()
    for text in (WHOLE[dialect] % 1, broken, begun, WHOLE[dialect] % 1 + WHOLE[dialect] % 2):
        bench._judge(dialect, httpx.Response(200, text=text), found)
    bench._judge(dialect, httpx.Response(503, text="{}"), found)
    assert (found.answered, found.broken, len(found.failed)) == (1, 1, 3)
    assert "2 answers in one" in found.failed[1]


def test_lines_that_are_gone_are_shown_as_sent_not_told_by_a_note() -> None:
    gone = list(withdrawn_cases())
    assert all(case.role is not None and not re.search(case.forbid, case.role) for case in gone)
    assert len(gone) == 60 and all(withdraws(case.first, case.role or "") for case in gone)


@pytest.mark.parametrize("case", [*cases(), *role_cases()], ids=lambda case: f"{case.kind}-{case.name}")
def test_a_case_is_about_something_that_changed(case: Case) -> None:
    first = (system_text(()), TOOLS, (case.reminder or (None, None))[0])
    now = (case.role or system_text(case.edits), case.tools, (case.reminder or (None, None))[1])
    between = system_text(case.before) if case.before is not None else first[0]
    assert now != first or between != first[0]
    re.compile(case.expect), re.compile(case.forbid)


@pytest.mark.parametrize(
    ("text", "right"),
    [("It is release/4.2.", True), ("It was main, now release/4.2", False), ("main", False), ("", False)],
)
def test_an_answer_is_right_if_it_says_the_new_value_only(text: str, right: bool) -> None:
    assert bench_notes.is_right(cases()[0], text) is right


def test_the_first_turn_is_asked_once_and_edits_hold_in_the_last() -> None:
    asked: list[list[dict[str, Any]]] = []

    def ask(session: str, messages: Sequence[dict[str, Any]], *more: Any) -> Any:
        asked.append(list(messages))
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7}}
        return {"choices": [{"message": {"content": "release/4.2"}}], "usage": usage}

    conversation = bench_notes.Conversation(ask)
    changed, back = cases()[0], next(case for case in cases() if case.kind == "changed back")
    assert conversation.answer(changed).right
    assert conversation.answer(back).computed == 3
    assert [len(messages) for messages in asked] == [2, 4, 4, 6]
    assert [STATE[0] in messages[0]["content"] for messages in asked] == [True, False, False, True]


def test_it_measures_and_extrapolates(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench_overhead, "STORED", 20)
    assert bench_overhead.main(["--sizes", "1000,2000", "--limit", "0", "--out", str(tmp_path / "o.json")]) == 0
    small, large = json.loads((tmp_path / "o.json").read_text())
    assert abs(small["tokens"] - 1000) < 400 and abs(large["tokens"] - 2000) < 400
    assert not small["trie_extrapolated"] and large["trie_extrapolated"]
    assert large["trie_ms"] == 4 * small["trie_ms"]


def test_the_stored_sequences_are_found_as_far_as_they_agree() -> None:
    store, main, _ = bench_overhead.stored_sequences(600)
    other = np.concatenate([main[:450], main[:100] + bench_overhead.VOCABULARY])
    assert store.lookup(tuple(other.tolist())).length == 450
    assert store.stats()["leaves"] > bench_overhead.STORED // 2


def test_it_measures_the_guard(capsys) -> None:
    assert bench_overhead.main(["--guard", "chatml", "--sizes", "1000", "--rounds", "1"]) == 0
    cold, warm = map(json.loads, capsys.readouterr().out.splitlines())
    assert (cold["turn"], warm["turn"]) == ("cold", "warm") and 1000 < cold["tokens"] < 20_000
    assert warm["ms"] > 0 and cold["ms"] > 0 and {"longer_low", "inside_low", "inside_median"} <= {*warm}


def test_it_measures_every_kind_of_text(tmp_path: Path) -> None:
    assert bench_parsing.main(["--tokens", "200", "--out", str(tmp_path / "o.json")]) == 0
    figures = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert set(figures) == {case.name for case in bench_parsing.cases(200)}
    assert all(0 < value < 5000 for value in figures.values())
