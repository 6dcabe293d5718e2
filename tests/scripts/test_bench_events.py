"""What publishing KV events costs the model thread."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.processes import ROOT

pytest.importorskip("zmq", reason="the extra `fleet` is not installed")


@pytest.mark.live
def test_the_model_thread_gives_less_than_a_hundredth_of_its_time() -> None:
    """Its own computing inside of the publisher's methods. Neighbours do not count."""
    command = [sys.executable, str(ROOT / "scripts" / "bench_events.py"), "--rounds", "5"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(said[said.index("{\n") :])
    assert found["calls"] * 100_000 / found["blocks_a_second"] < 0.01  # a busy machine does fewer
