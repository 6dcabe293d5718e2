"""Servers as processes of their own, on an oracle checkpoint: for what a process does and suffers as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from start_llm.host.ports import free_port
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
WAIT = 180.0  # a start computes for 7 s, which takes long beside busy neighbours
Spawn = Callable[..., AbstractContextManager[tuple[str, subprocess.Popen[str]]]]
"""`process` on the plain oracle: see the fixture."""


@contextmanager
def process(
    model: Path, folder: Path, *, ready: bool = True, program: str = "start_llm", **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's URL and its process, which is killed at the end. What it says goes to ``folder / "said"``.

    Args:
        ready: waits until it serves.
        program: the module that is run.
        environment: settings, and what the oracle reads.
    """
    port = free_port()
    variables = {
        **os.environ,
        "MODEL_PATH": str(model),
        "TRUST_REMOTE_CODE": "true",
        "START_LLM_CACHE_DIR": str(folder),
        "MLX_PORT": str(port),
        "PROXY": "off",
        "REANCHOR": "off",
        "LOG_ROOT": str(folder / "logs"),
        "DEFAULT_TEMPERATURE": "0",
        "LOG_JSON": "true",
        **environment,
    }
    with (folder / "said").open("w") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", program, "serve"],
            cwd=ROOT,
            env=variables,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        if ready:
            until(lambda: healthy(url) or child.poll() is not None)
            assert child.poll() is None, (folder / "said").read_text()
        yield url, child
    finally:
        child.kill()
        child.wait(WAIT)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=20).status_code == 200
    except httpx.TransportError:
        return False


def figures(url: str) -> dict[str, float]:
    """Of `/metrics`."""
    lines = httpx.get(f"{url}/metrics", timeout=WAIT).text.splitlines()
    return {
        name: float(value) for name, _, value in (line.partition(" ") for line in lines) if name.startswith("start_")
    }
