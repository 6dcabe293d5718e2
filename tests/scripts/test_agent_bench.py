"""The benchmark against a server that caches nothing: it must see the work and every wrong answer. What is new."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import agent_bench
from scripts.bench.agent import Step, Style, judge
from scripts.bench.client import Call, Reply
from scripts.bench.counting import NewTokens, assistant_units, request_units
from scripts.bench.replay import CallIds, as_chat, replay, summary
from scripts.bench.runner import run_scenario
from scripts.bench.servers import Server
from tests.scripts.fake_server import count


@pytest.mark.parametrize(
    "name", ["append", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tools_object", "reminder"))]
)
def test_a_server_without_a_cache_computes_everything(name: str, server: Server) -> None:
    result = run_scenario(name, server, count, "test")
    assert result.wrong == []
    assert result.computed == sum(row.report["prompt"] for row in result.rows if row.report)
    assert result.ratio is not None and result.ratio > 2
    assert result.unexplained == len(result.rows)
    first = result.rows[0]  # all of it is new: our plain rendering and the model's own template agree
    assert first.report is not None and abs(first.new - first.report["prompt"]) < 0.02 * first.report["prompt"]


@pytest.mark.thorough
def test_restart_is_skipped_where_nobody_can_restart(server: Server) -> None:
    assert "restart" in str(run_scenario("restart", server, count, "test").skipped)


@pytest.mark.thorough
def test_without_the_oracles_log_work_is_unknown(server: Server) -> None:
    result = run_scenario("append", replace(server, log=None), count, "test")
    assert result.ratio is None and not result.wrong


STEP = Step("Look.", "hm", ("ls", {"path": "."}))
GOOD = Reply("Look.\n", "\nhm\n", [Call("1", "ls", '{"path":"."}')])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"content": "Loook."}, "said"),
        ({"reasoning": ""}, "reasoned"),
        ({"calls": []}, "called"),
        ({"calls": [Call("1", "ls", '{"path": "/"}')]}, "called"),
        ({"error": "500"}, "500"),
        ({"content": "Look. (now 1@3, before 1@0)"}, None),
        ({"content": "Look. (now 0@-1, before 1@0)"}, "not visible"),
        ({"content": "Look. (now 1@0, before 1@3)"}, "behind"),
        ({"content": "Look. "}, "no find result"),
    ],
)
def test_wrong_answers_are_seen(change: dict, complaint: str | None) -> None:
    """A value that the model does not see, or sees at the wrong place, is one."""
    finds = " (now {find: x}, before {find: y})" if change.get("content", "").startswith("Look. ") else ""
    said = judge(replace(GOOD, **change), STEP, finds)
    assert (complaint or "") in (said or "") and bool(said) == bool(complaint)


def test_styles_send_history_back_as_clients_do() -> None:
    assert "reasoning_content" not in Style("strip").assistant(GOOD)
    assert Style("echo").assistant(GOOD)["reasoning_content"] == "hm"
    doubled = Style("doubled").assistant(GOOD)
    assert doubled["content"].startswith("<think>\nhm\n</think>") and doubled["reasoning_content"] == "hm"
    sent = [Style("echo", how).assistant(GOOD)["tool_calls"] for how in ("as_is", "compact", "object")]
    assert [call["function"]["arguments"] for (call,) in sent] == ['{"path":"."}', '{"path":".' + '"}', {"path": "."}]


def trace(folder: Path) -> Path:
    """Two requests of one session, as recorded."""
    reply = {"reasoning": "hm", "text": "", "calls": [{"id": "1", "name": "ls", "arguments": '{"path": "."}'}]}
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"."}'}}
    first = [{"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Go."}]}]
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    second = [*first, turn, {"role": "tool", "tool_call_id": "1", "content": "a b"}]
    lines = [
        {"path": "/v1/chat/completions", "body": {"messages": first}, "reply": reply},
        {"path": "/v1/responses", "body": {}, "reply": reply},
        {"path": "/v1/chat/completions", "body": {"messages": second}, "reply": {"text": "It is a b."}},
    ]
    (folder / "pi").mkdir()
    (folder / "pi" / "1-main.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_recorded_requests_are_answered_as_then(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    rows = replay(server, checkpoint, trace(tmp_path))
    assert [row.wrong for row in rows] == [None, None]
    assert rows[0].optimum == rows[0].prompt == rows[0].computed
    assert 0 < rows[1].optimum < rows[1].prompt == rows[1].computed
    assert summary(rows)[-1]["computed"] == rows[0].prompt + rows[1].prompt


def test_recorded_calls_have_the_ids_that_the_server_gave() -> None:
    ids = CallIds()
    ids.learn(
        {"calls": [{"id": "call_12ab", "name": "ls", "arguments": "{}"}]}, Reply(calls=[Call("call_99cd", "ls", "{}")])
    )
    sent = {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "call12ab"}, {"id": "other"}]},
            {"role": "tool", "tool_call_id": "call12ab"},
        ]
    }
    first, second = ids.put_into(sent)["messages"]
    assert [call["id"] for call in first["tool_calls"]] == ["call_99cd", "other"] and second[
        "tool_call_id"
    ] == "call_99cd"


def test_a_body_of_anthropics_messages_is_rendered_as_chat() -> None:
    call = {"type": "tool_use", "id": "toolu_12ab", "name": "ls", "input": {"path": "."}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    body = {
        "system": [{"type": "text", "text": "Be."}],
        "messages": [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "So."}, call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_12ab", "content": "a b"}]},
        ],
        "tools": [{"name": "ls", "input_schema": {"type": "object"}}],
    }
    calls = [{"function": {"name": "ls", "arguments": {"path": "."}}}]
    assert as_chat(body) == {
        "messages": [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "So.", "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "content": "a b"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "ls", "description": "", "parameters": {"type": "object"}}}
        ],
    }
    ids = CallIds()
    ids.learn({"calls": [{"id": "toolu_12ab"}]}, Reply(calls=[Call("toolu_99cd", "ls", "{}")]))
    _, answer, result = ids.put_into(body)["messages"]
    assert answer["content"][2]["id"] == result["content"][0]["tool_use_id"] == "toolu_99cd"


@pytest.mark.parametrize("plot", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_writes_figures_and_a_picture(server: Server, tmp_path: Path, plot: bool) -> None:
    options = ["--url", server.url, "--oracle-log", str(server.log), "--scenarios", "append"]
    if plot:
        pytest.importorskip("matplotlib")
        options.append("--plot")
    assert agent_bench.main([*options, "--out", str(tmp_path)]) == 1  # it recomputes and gives no reason
    data = json.loads((tmp_path / "agent_bench.json").read_text())
    assert data["scenarios"]["default_model"]["total"]["ratio"] > 2
    assert "| append |" in (tmp_path / "agent_bench.md").read_text()
    picture = tmp_path / "agent_bench.png"
    assert picture.exists() == plot and (not plot or picture.stat().st_size > 1000)


HEADER, END = "<|im_start|>user\n", "<|im_end|>\n"


def words(text: str) -> int:
    return len(text.split())


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture
def books() -> NewTokens:
    made = NewTokens(words)
    first = request_units([say("system", "Be good.\nTime is 10:05 now."), say("user", "one two three")])
    assert made.new(first) == made.price(first)
    made.add(first, assistant_units("fine thanks", "let me think", [("ls", '{"b": 1, "a": 2}')]))
    return made


def history(system: str = "Be good.\nTime is 10:05 now.", **assistant: Any) -> list[dict[str, Any]]:
    return [say("system", system), say("user", "one two three"), say("assistant", "fine thanks", **assistant)]


CALLS = [{"tool_calls": [{"function": {"name": "ls", "arguments": arguments}}]} for arguments in
         ('{"a":2,"b":1}', '{"b": 1, "a": 2}', {"a": 2, "b": 1})]  # fmt: skip
CALL = CALLS[0]
THOUGHT = {"reasoning_content": "let me think"}
SAME = history(**THOUGHT, **CALL)
DOUBLED = {**SAME[2], "content": "<think>\nlet me think\n</think>\n\nfine thanks"}


@pytest.mark.parametrize(
    ("messages", "costs"),
    [
        pytest.param([*SAME, say("user", "four")], [HEADER, "four\n", END], id="an appended message"),
        *(pytest.param(history(**THOUGHT, **call), [], id="the way arguments are written") for call in CALLS),
        pytest.param(history(**CALL), [], id="stripped reasoning"),
        pytest.param([*SAME[:2], DOUBLED], [], id="doubled reasoning"),
        pytest.param(
            history("Be good.\nTime is 10:06 now.", **THOUGHT, **CALL), ["Time is 10:06 now.\n"], id="a changed line"
        ),
        pytest.param([SAME[0], say("user", "by the way"), *SAME[1:]], [HEADER, "by the way\n", END], id="an insertion"),
    ],
)
def test_what_a_change_costs(books: NewTokens, messages: list[dict[str, Any]], costs: list[str]) -> None:
    """Itself, and the generation prompt."""
    assert books.new(request_units(messages)) == books.price([*costs, "<|im_start|>assistant\n"])


def test_a_changed_answer_costs_what_was_changed(books: NewTokens) -> None:
    messages = history(**CALL)
    messages[-1]["content"] = "not what was said"
    assert books.new(request_units(messages)) >= words("not what was said")


def test_tools_in_another_order_cost_nothing() -> None:
    books, messages = NewTokens(words), [say("user", "hi")]
    tools = [{"function": {"name": name, "description": f"the tool {name}"}} for name in "abc"]
    books.add(request_units(messages, tools), [])
    assert books.new(request_units(messages, tools[::-1])) == 1


def test_what_another_conversation_quotes_is_new(books: NewTokens) -> None:
    units = request_units([say("system", "Write a title."), say("user", "one two three")])
    assert books.new(units) == books.price(units)


def test_the_closest_earlier_request_counts() -> None:
    books = NewTokens(words)
    for text in ("a b c", "d e f", "g h i"):
        books.add(request_units([say("user", text)]), [])
    assert books.new(request_units([say("user", "d e f"), say("user", "j")])) < words("d e f") + 4
