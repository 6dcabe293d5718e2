"""How proxies share out conversations, over many simulated runs: see `scripts/simulate_nodes`."""

from __future__ import annotations

import argparse

import pytest

from scripts.simulate_nodes import run, simulated

RUNS = 20
WORK = {"nodes": 3, "conversations": 12, "systems": 3, "turns": 8, "at_once": 4, "late": 0.05}


@pytest.mark.thorough
def test_nine_runs_of_ten_compute_little_more_than_one_node_and_are_balanced() -> None:
    options = argparse.Namespace(**WORK, proxies=1)
    found = [simulated(run(options, seed)) for seed in range(RUNS)]
    good = sum(outcome.computed <= 1.05 and outcome.requests <= 1.2 for outcome in found)
    assert good >= RUNS * 0.9, [outcome for outcome in found if outcome.computed > 1.05 or outcome.requests > 1.2]
