"""The overhead benchmark runs, on small sizes, and its figures are what they say."""

import json
from pathlib import Path

import numpy as np

from scripts import bench_overhead


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
