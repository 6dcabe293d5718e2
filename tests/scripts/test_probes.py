"""The probes and the benchmark against start_llm itself, the readers against logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import diff_turns, inspect_mlx_cache, pi_like_probe, probe_session
from scripts.bench import limits
from scripts.bench.runner import run_scenario
from scripts.bench.scenarios import SCENARIOS
from scripts.bench.servers import Server, served
from tests.integration.live import live
from tests.oracle import Kind, build_oracle
from tests.scripts.fake_server import count


def test_pi_like_probe_runs_through(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--url", server.url, "--turns", "2", "--lines", "5"]
    assert pi_like_probe.main([*asked, "--no-check"]) == 0
    assert "reused after the first request: 0.0%" in capsys.readouterr().out
    assert pi_like_probe.main(asked) == 1


def test_pi_like_probe_passes_on_a_sound_server_with_a_picture_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORACLE_REPLIES", str(reply := tmp_path / "reply.txt"))
    reply.write_text("I looked at it.")
    with live(build_oracle(tmp_path / "model", "plain"), tmp_path / "cache") as server:
        assert pi_like_probe.main(["--url", server.url]) == 0, capsys.readouterr().out
        assert pi_like_probe.main(["--url", server.url, "--image", "--seed", "2"]) == 0, capsys.readouterr().out
    assert "image_url" in json.dumps(pi_like_probe.picture("2"))


def test_where_nobody_answers_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert pi_like_probe.main(["--url", "http://127.0.0.1:9", "--model", "x", "--turns", "1"]) == 1
    assert inspect_mlx_cache.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_probe_session_sees_that_nothing_is_reused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe_session.main(["--url", server.url]) == 1
    assert capsys.readouterr().out.count("below") == 6


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.thorough
def test_probe_session_passes_on_a_sound_server_and_diff_turns_tells_what_is_unproved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: Kind
) -> None:
    reply = tmp_path / "reply.txt"
    monkeypatch.setenv("ORACLE_REPLIES", str(reply))
    reply.write_text("I looked at each of the files, and this is what I found in them. " * 8)
    with live(build_oracle(tmp_path / "model", kind), tmp_path / "cache") as server:
        assert probe_session.main(["--url", server.url, "--seed", "1"]) == 0
        assert capsys.readouterr().out.count(" ok ") == 6
        turns = [{"role": "system", "content": "Customer: Alicia"}, {"role": "user", "content": "Tell me all."}]
        said = server.chat(turns)["message"]["content"]
        more = [turns[1], {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        server.chat([{"role": "system", "content": "Customer: Robert"}, *more])
    assert diff_turns.main(["--logs", str(tmp_path / "cache" / "logs")]) == 0
    told = capsys.readouterr().out
    assert "message 0, system. line 1 differs" in told and "remedy: send session_id in all turns" in told


ENTRY = {"id": "r2", "prompt": 100, "reused": 20, "computed": 80, "new": 5}
MISS = {"reason": "diverged", "token": 20, "message": 0, "field": "content", "rule": "clock"}
MISS |= {"expected": "a", "found": "b"}


def write_log(folder: Path) -> Path:
    day = folder / "2026-11-21"
    day.mkdir(parents=True)
    lines = [json.dumps({**ENTRY, "id": "r1", "computed": 5}), json.dumps({**ENTRY, "miss": MISS}), '{"id": "cut']
    (day / "session-x.jsonl").write_text("\n".join(lines))
    return day / "session-x.jsonl"


def test_diff_turns_tells_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_turns.main(["--logs", str(tmp_path)]) == 1  # there are none
    log = write_log(tmp_path)
    assert diff_turns.main(["--logs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "r2 prompt=100 reused=20 computed=80 new=5 twice=75" in out and "r1 prompt" not in out
    assert "diverged at token 20, message 0, content, rule clock" in out and "now:    'b'" in out
    assert diff_turns.main([str(log), "--all"]) == 0
    assert "r1 prompt" in capsys.readouterr().out


METRICS = """# TYPE start_llm_tokens counter
start_llm_tokens_total{kind="reused"} 41.0
# TYPE other gauge
other 1.0
# TYPE start_llm_first_token_seconds histogram
start_llm_first_token_seconds_bucket{le="+Inf"} 2.0
start_llm_first_token_seconds_count 2.0
"""


def test_metrics_of_ours_are_read() -> None:
    assert inspect_mlx_cache.figures(METRICS) == {"tokens_total (reused)": 41.0, "first_token_seconds_count": 2.0}


QUICK = ("tools_compact", "clock", "insertion")
LOOSE = {"insertion": 2.0, "customer_chat": 2.5}


@pytest.fixture(scope="module", params=["hybrid", pytest.param("plain", marks=pytest.mark.slow)])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = build_oracle(folder / "oracle", request.param)
    with served("start_llm", checkpoint, folder / "work") as server:
        yield server


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]
)
def test_a_turn_costs_what_is_new_in_it(name: str, ours: Server) -> None:
    result = run_scenario(name, ours, count, "test")
    assert result.wrong == []
    assert result.ratio is not None and result.ratio <= LOOSE.get(name, 1.35)


def test_another_customer_is_told_as_unproved(ours: Server) -> None:
    rows = run_scenario("customer_chat", ours, count, "unproved").rows
    misses = [(row.report or {}).get("miss") for row in rows]
    assert [miss is not None for miss in misses] == [False, False, False, True, False, False]
    assert (misses[3]["reason"], misses[3]["field"], misses[3]["message"]) == ("unproved", "system", 0)
    assert misses[3]["remedy"] == "send session_id in all turns" and "line 3" in misses[3]["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("limit", limits.LIMITS)
def test_limits_are_kept(limit, kind: str, tmp_path: Path) -> None:
    found = limit(build_oracle(tmp_path / "oracle", kind), tmp_path / "work", count, "test")
    assert found.kept, found
