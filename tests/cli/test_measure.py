from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.cli import bench, deep
from start_llm.cli.measure import Timed
from start_llm.clients.agent import Endpoint
from start_llm.core.settings import Settings, load_settings
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
