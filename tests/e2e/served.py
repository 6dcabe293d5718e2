"""The real server with the real proxy in front of it, for clients that run in the test's own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from start_llm.host.ports import ask_json, free_port
from start_llm.host.processes import wait_until
from tests.e2e.world import World, begin, end, server_settings

KEY = "sk-end-to-end"


@dataclass(frozen=True)
class Target:
    """What a client connects to."""

    url: str
    key: str
    model: str


@contextmanager
def make_served(folder: Path, oracle: Path, *paths: Path) -> Iterator[tuple[dict[str, Target], World]]:
    """The real server, which starts the real proxy; both on free ports.

    Args:
        paths: where the server's Python looks for modules, too.
    """
    port, proxy_port = free_port(), free_port()
    given = server_settings(folder, oracle, port, *paths)
    given |= {"PROXY_PORT": str(proxy_port), "LITELLM_MASTER_KEY": KEY}
    process = begin([sys.executable, "-m", "start_llm", "serve"], folder, os.environ | given, folder / "server.txt")
    url, proxy_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy_port}"
    try:
        for ready in (f"{url}/health", f"{proxy_url}/health/readiness"):
            wait_until(lambda ready=ready: process.poll() is not None or ask_json(ready)[0] == 200, 120)  # type: ignore[misc]
            assert process.poll() is None and ask_json(ready)[0] == 200, (folder / "server.txt").read_text()[-3000:]
        yield (
            {
                "direct": Target(url, "none", "oracle"),
                "proxy": Target(proxy_url, KEY, "oracle"),
                "wildcard": Target(proxy_url, KEY, "claude-opus-4-6"),
            },
            World(folder, [], port, port, (proxy_port, KEY)),
        )
    finally:
        end(process)
