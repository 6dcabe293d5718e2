"""The commands `demo`, `bench` and `doctor --deep`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from start_llm.cli import bench, deep, demo
from start_llm.cli.measure import Timed
from start_llm.clients.agent import Endpoint
from start_llm.core.settings import Settings, load_settings
from start_llm.launch import chat
from tests.oracle import build_oracle
from tests.waiting import PATIENCE_SECONDS, until


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("measure")
    model = build_oracle(folder / "oracle", "hybrid")
    return load_settings(
        None, model_path=str(model), trust_remote_code=True, start_llm_cache_dir=folder, log_root=folder / "logs"
    )


def test_a_sound_model_answers_the_same_in_every_way(settings: Settings) -> None:
    found = {each.subject: each for each in deep.deep(settings)}
    assert set(found) >= {"after a restart", "with drafts", "reused", "forked", "in a batch, first", "peak memory"}
    assert {each.verdict for each in found.values()} == {"ok"}, found
    assert "oracle" in found["about"].text


def test_another_answer_is_bad_and_so_is_one_that_reused_nothing() -> None:
    right = Timed(prompt=100, computed=100, generated=4, first=1.0, seconds=2.0, text="one two")
    other = Timed(prompt=100, computed=10, generated=4, first=1.0, seconds=2.0, text="one too")
    assert deep.same("x", right, other) == ("x", "bad", deep.same("x", right, other).text)
    assert "from character 5 on" in deep.same("x", right, other).text
    assert deep.same("x", right, right).verdict == "ok" and deep.same("x", right, right, reused=True).verdict == "bad"
    assert (right.prefill, right.decode) == (100.0, 3.0)


@pytest.mark.live
def test_a_bench_that_is_ended_leaves_no_folder(settings: Settings, tmp_path: Path) -> None:
    own = {"TMPDIR": tmp_path, "START_LLM_HOME": tmp_path, "START_LLM_CACHE_DIR": tmp_path / "cache"}
    environment = os.environ | {name: str(path) for name, path in own.items()} | {"TRUST_REMOTE_CODE": "true"}
    command = [sys.executable, "-m", "start_llm", "bench", str(settings.model_path)]
    with subprocess.Popen(command, env=environment) as process:
        until(lambda: bool(list(tmp_path.glob("start-llm-bench-*"))))
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 130
    assert not list(tmp_path.glob("start-llm-bench-*"))


@pytest.mark.parametrize(("rate", "tokens"), [(1.1, 8), (5.0, 30), (100.0, 64)])
def test_answers_of_a_slow_machine_are_short(monkeypatch: pytest.MonkeyPatch, rate: float, tokens: int) -> None:
    found = Timed(prompt=64, computed=64, generated=8, first=1.0, seconds=1.0 + 7 / rate, text="")
    monkeypatch.setattr(bench, "timed", lambda *_: found)
    endpoint = Endpoint(url="http://127.0.0.1:1", key="none", model="m", context=8192, answer=64)
    assert bench.answer_of(endpoint) == tokens


def test_bench_has_every_row_and_says_what_it_left_out(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LENGTHS", (512, 1024, 1 << 20))
    monkeypatch.setattr(bench, "HEAD", 300)
    monkeypatch.setattr(bench, "TURNS", 3)
    model, columns = bench.measure(settings, tmp_path, None)
    rows = columns["start_llm"]
    assert model == "oracle" and rows["prefill at 1024k, tokens/s"].startswith("- (context")
    assert float(rows["prefill at 1k, tokens/s"].replace(",", "")) > 0
    assert float(rows["from the start until it answers"].split()[0]) > 0

    def computed(row: str) -> int:
        return int(rows[row].split("(")[1].split(" of ")[0].replace(",", ""))

    assert computed("first token at 1k, asked again") < 100 < computed("first token at 1k")
    assert computed("first token of turn 3") * 2 < computed("the same turn 3 with nothing stored")
    assert computed("first token after a restart") * 2 < computed("first token of an agent's turn 1")
    lines = bench.table({"start_llm": rows, "other": {"prefill at 1k, tokens/s": "9"}})
    assert lines[0] == "| | start_llm | other |" and sum("| 9 |" in line for line in lines) == 1


def chunk(delta: dict[str, Any] | None = None, usage: dict[str, Any] | None = None) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n"


def usage(prompt: int, generated: int, **own: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, **own}


def backend(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[dict[str, Any]]:
    """Answers the n-th request with the n-th list of chunks; gives the bodies."""
    left, bodies = list(answers), list[dict[str, Any]]()

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text="".join(left.pop(0)) + "data: [DONE]\n\n")

    own = httpx.Client
    monkeypatch.setattr(chat.httpx, "Client", lambda **_: own(transport=httpx.MockTransport(answer)))
    return bodies


def test_a_conversation_resends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(url="http://test", key="x", model="m", context=4096, answer=demo.MAX_TOKENS)
    bodies = backend(
        monkeypatch,
        [
            chunk({"role": "assistant", "reasoning_content": "hm"}),
            chunk({"content": "I "}),
            chunk({"content": "look."}),
            chunk(usage=usage(100, 20, start_llm={"reused": 0, "computed": 100})),
        ],
        [chunk({"content": "b"}), chunk(usage=usage(150, 5, prompt_tokens_details={"cached_tokens": 118}))],
        [chunk({"content": "c"}), chunk(usage=usage(170, 5))],
    )
    turns = demo.converse(endpoint)
    assert [(t.found.prompt, t.resent, t.reused, t.found.computed) for t in turns] == [
        (100, 0, 0, 100),
        (150, 120, 118, 32),
        (170, 155, 0, 170),
    ]
    assert [t.share >= demo.ENOUGH for t in turns] == [True, True, False]
    assert all(t.found.first > 0 for t in turns)
    assert all(body["tools"] and body["temperature"] == 0 and body["max_tokens"] == demo.MAX_TOKENS for body in bodies)
    first, second, third = (body["messages"] for body in bodies)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert second[len(first)] == {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    assert [m["content"] for m in third if m["role"] == "user"] == list(demo.TURNS)


def test_the_table_has_a_row_for_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [
        demo.DemoTurn(Timed(prompt=1000, computed=1000, generated=1, first=1.5, seconds=2, text=""), resent=0),
        demo.DemoTurn(Timed(prompt=1200, computed=210, generated=1, first=0.5, seconds=2, text=""), resent=1000),
    ]
    Console(width=100).print(demo.table(turns))
    said = capsys.readouterr().out
    assert "1,000" in said
    assert "990 (99%)" in said
    assert "1.50 s" in said
