"""Servers with several models: three oracles, SmolLM2 beside them, and what tests ask of the pool."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx

from start_llm.models.device import LEAST_CACHE_BYTES, PREFILL_BYTES
from tests.integration.live import WAIT, Live

BUDGET_FOR_TWO = PREFILL_BYTES + 2 * LEAST_CACHE_BYTES + 64 * 2**20
ORACLES = ("oracle-plain", "oracle-hybrid", "oracle-windowed")
SMOL = "smol"
TURN = "What is the hash?"


def link_oracles(folders: dict[str, Path], cache: Path) -> None:
    """All but the plain one, which is the main model, into the models folder of `cache`."""
    models = cache / "models"
    models.mkdir(parents=True, exist_ok=True)
    for kind in ("hybrid", "windowed"):
        if not (models / f"oracle-{kind}").exists():
            (models / f"oracle-{kind}").symlink_to(folders[kind])


def link_smol(cache: Path, smol_path: Path) -> int:
    """SmolLM2 into the models folder of `cache`. Returns its bytes."""
    (cache / "models").mkdir(parents=True, exist_ok=True)
    (cache / "models" / SMOL).symlink_to(smol_path)
    return sum(path.stat().st_size for path in smol_path.iterdir())


def states(server: Live) -> dict[str, str]:
    """By model."""
    models = server.get("/v1/models").json()["data"]
    return {model["id"]: model["details"]["state"] for model in models}


def ask(server: Live, name: str = "default", content: str = TURN, **more: Any) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=2 * WAIT)


class Asking:
    """A request on a thread of its own."""

    def __init__(self, server: Live, name: str) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(ask(server, name, "[[truth]]")))
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(2 * WAIT)
        (answer,) = self._answers
        return answer


def admin(server: Live, what: str, **body: Any) -> httpx.Response:
    """``POST /v1/models/load``, ``unload`` or ``pin``."""
    return server.post(f"/v1/models/{what}", json=body)
