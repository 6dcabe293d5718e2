"""The process that LiteLLM runs in: what starts it, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from start_llm.host.home import python_path
from start_llm.proxy.child import MODULE


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": python_path(), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.live
def test_it_watches_its_server_before_litellm_is_imported() -> None:
    run = python(
        "-c", f"import sys, {MODULE}; print(sorted({{'litellm', 'fastapi', 'pydantic', 'mlx'}} & set(sys.modules)))"
    )
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.live
def test_it_must_lead_its_own_process_group() -> None:
    """It ends its whole group."""
    run = python("-m", MODULE, "0", "/nowhere", "--")
    assert run.returncode != 0 and "must lead its own process group" in run.stderr
