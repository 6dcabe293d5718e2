"""A disk that fills up, a home that may only be read, and a folder that two servers share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import WAIT, Start
from tests.integration.processes import ROOT
from tests.waiting import until

WORDS = "word " * 300
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def has_namespaces() -> bool:
    """Linux, where a user may mount in a namespace of their own."""
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.live
@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_a_disk_that_fills_up_and_a_home_that_may_only_be_read(
    oracle_path: Callable[..., Path], tmp_path: Path
) -> None:
    if not has_namespaces():
        pytest.skip("nothing can be mounted here")
    program = str(Path(__file__).with_name("hostile_disk.py"))
    command = [*NAMESPACE, sys.executable, program, str(oracle_path("hybrid")), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all right" in done.stdout


def test_two_servers_on_one_folder(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answer and share stored responses. The second keeps KV in memory, until it takes the first one's over."""
    monkeypatch.setattr("start_llm.kvcache.disk.tier.DiskTier.retry_seconds", 0.1)
    first = start(kv_disk_dir="auto")
    second = start(kv_disk_dir="auto")
    with ExitStack() as stack:
        one = stack.enter_context(first)
        with second as two:
            history: list[dict[str, Any]] = []
            other: list[dict[str, Any]] = [{"role": "system", "content": "Another."}]
            for server, talk, part in ((one, history, 1), (one, history, 2), (two, other, 1)):
                server.turn(talk, f"part {part} {WORDS}")
            made = one.post("/v1/responses", json={"model": "default", "input": "hi"})
            found = two.get(f"/v1/responses/{made.json()['id']}")
            assert found.status_code == 200
            one.turn(list(history), f"part 3 {WORDS}")
            stack.close()  # the first one ends
            until(lambda: "kv_disk_paused 0.0" in two.get("/metrics").text)
            two.app.engine.call(lambda scheduler: scheduler.store.idle(), WAIT)
            before = two.work()
            two.turn(history, f"part 3 {WORDS}")
            assert two.work() - before < 400, "the first one's KV was not found"
            two.turn(other, f"part 2 {WORDS}")
