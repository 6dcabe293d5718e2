"""The benchmark against start_llm itself, in a process of its own: the product's promise, measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench import limits
from scripts.bench.runner import run_scenario
from scripts.bench.scenarios import SCENARIOS
from scripts.bench.servers import Server, served
from tests.oracle import build_oracle, make_tokenizer

TOKENIZER = make_tokenizer()
QUICK = ("tools_compact", "clock", "insertion")
LOOSE = {"insertion": 2.0, "customer_chat": 2.5}


def count(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


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
