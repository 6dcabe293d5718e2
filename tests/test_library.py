"""The server as a library: the page's example runs as it stands, and prints only what it says itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle import build_oracle

PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text("utf-8")


@pytest.mark.live
def test_a_process_that_may_open_few_files_serves() -> None:
    """mlx-lm's import asks for 4,096, which only those who may raise limits (root on Linux) get."""
    code = (
        "import ctypes, os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "if sys.platform == 'linux':\n"
        "    ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: for what is executed next\n"
        "what = 'import start_llm.models.loader, resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))'\n"
        "os.execv(sys.executable, [sys.executable, '-c', what])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("(256, 256)\n", 0), done.stderr


@pytest.mark.live
def test_the_example_runs_and_prints_nothing_else(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    environment = {
        **os.environ,
        "MODEL_PATH": str(build_oracle(tmp_path / "oracle", "plain")),
        "TRUST_REMOTE_CODE": "true",
        "START_LLM_CACHE_DIR": str(tmp_path / "cache"),
        "LOG_ROOT": str(tmp_path / "logs"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    run = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
    # transformers has words of its own for a kind of model that it does not know, as the oracle is one.
    assert [line for line in run.stderr.splitlines() if not line.startswith("[transformers]")] == []
    first, second, third = run.stdout.splitlines()
    assert first.startswith("Answer ") and second.startswith("Answer ")
    reused, prompt = map(int, re.findall(r"\d+", third))
    assert 0 < reused < prompt
