"""The real LiteLLM, for the tests of a file, and what they ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from start_llm.api.server import ApiServer
from start_llm.core.settings import Settings
from start_llm.proxy.launcher import LiteLLMProxy
from tests.proxy.stub import CARD

START_SECONDS = 360.0  # LiteLLM computes for 8 s; on a machine with busy neighbours that may take minutes
DIALECTS = ["chat/completions", "messages", "responses"]


@contextmanager
def running(
    settings: Settings, server_url: str, folder: Path, model_id: str = "tiny", elsewhere: dict[str, str] | None = None
) -> Iterator[LiteLLMProxy]:
    """A proxy that is ready; its log and its key are in the folder."""
    names: dict[str, Any] = {"server_url": server_url, "model_id": model_id, "card": CARD}
    proxy = LiteLLMProxy(settings, **names, log_path=folder / "log", env_file=folder / ".env")
    proxy.elsewhere = elsewhere or proxy.elsewhere
    proxy.start()
    try:
        assert proxy.wait_ready(START_SECONDS), proxy.log_tail()
        yield proxy
    finally:
        proxy.stop()


@contextmanager
def in_front_of(server: ApiServer, settings: Settings, folder: Path, **more: Any) -> Iterator[LiteLLMProxy]:
    """A proxy that is ready, and its server, which runs as long."""
    server.start()
    try:
        with running(settings, server.url, folder, **more) as proxy:
            yield proxy
    finally:
        server.stop(0)


def client_of(proxy: LiteLLMProxy, timeout: float = 60.0) -> httpx.Client:
    """Its paths begin behind `/v1/`."""
    headers = {"Authorization": f"Bearer {proxy.master_key}"}
    return httpx.Client(base_url=f"{proxy.url}/v1/", headers=headers, timeout=timeout)


def body_of(dialect: str, text: str, **more: Any) -> dict[str, Any]:
    if dialect == "completions":
        return {"model": "tiny", "prompt": text, **more}
    said = [{"role": "user", "content": text}]
    body = {"input": said} if dialect == "responses" else {"max_tokens": 50, "messages": said}
    return {"model": "tiny", **body, **more}
