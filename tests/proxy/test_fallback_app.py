"""FALLBACK_MODEL with a whole server: real refusals, a provider of another kind, and an address that leads back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.app import App
from start_llm.core.settings import load_settings
from start_llm.host.ports import free_port
from start_llm.host.processes import wait_until
from tests.oracle import build_oracle
from tests.proxy.stub import TEXT, StubServer
from tests.proxy.test_fallback import DIALECTS, HEADER, KEY, START_SECONDS, body_of, sentence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "anthropic/claude-sonnet-4-5"
LONG = "word " * 3000


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[tuple[App, httpx.Client]]:
    model = build_oracle(folder / "oracle", "plain")
    broken = build_oracle(folder / "cache" / "models" / "broken", "hybrid") / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text("utf-8")) | {"layer_kinds": ["?"]}), "utf-8")
    given = {
        "model_path": str(model),
        "trust_remote_code": True,
        "start_llm_cache_dir": folder / "cache",
        "mlx_port": 0,
        "litellm_master_key": "sk-proxy",  # without it one is made and kept in the current folder
    }
    given |= {"log_root": folder / "logs", "proxy": "on", "proxy_port": 0, "max_kv_size": 1024, "fallback_api_key": KEY}
    with App(load_settings(None, **given | settings), say=lambda line: None) as app:
        assert app.proxy is not None and app.proxy.wait_ready(START_SECONDS), app.proxy and app.proxy.log_tail()
        headers = {"Authorization": f"Bearer {app.proxy.master_key}"}
        with httpx.Client(base_url=f"{app.proxy.url}/v1/", headers=headers, timeout=120) as web:
            yield app, web


def test_a_server_that_cannot_answer_and_a_vendor_that_can(tmp_path: Path) -> None:
    cloud = StubServer()
    with served(tmp_path, fallback_model=MODEL, fallback_api_base=cloud.url) as (app, web):
        for dialect in DIALECTS:
            for stream in (False, True):
                given = web.post(dialect, json=body_of(dialect, LONG, stream=stream) | {"model": "default"})
                assert given.headers[HEADER] == f"{MODEL}; context_length_exceeded" and TEXT in given.text
                given = web.post(dialect, json=body_of(dialect, "hi", stream=stream) | {"model": "broken"})
                assert given.headers[HEADER] == f"{MODEL}; model_not_loadable" and TEXT in given.text
                given = web.post(dialect, json=body_of(dialect, "hi", stream=stream) | {"model": "default"})
                assert given.status_code == 200 and HEADER not in given.headers and TEXT not in given.text
        assert len(cloud.seen) == 12
        assert all(seen.path == "/v1/messages" and seen.headers["x-api-key"] == KEY for seen in cloud.seen)
        assert web.headers["authorization"].split()[1] not in json.dumps([seen.headers for seen in cloud.seen])
        straight = httpx.post(f"{app.url}/v1/messages", json=body_of("messages", LONG) | {"model": "default"})
        assert straight.status_code == 400 and len(cloud.seen) == 12, "the server's own port sends nothing anywhere"

        # A wrong key: the provider is left alone after the first time.
        cloud.fails[:] = [401]
        for _ in range(3):
            given = web.post("messages", json=body_of("messages", LONG) | {"model": "default"})
            assert given.status_code == 400 and "prompt is too long" in sentence(given)
            assert given.headers[HEADER].endswith("; failed")
        assert len(cloud.seen) == 13
        given = web.post("messages", json=body_of("messages", "hi") | {"model": "default"})
        assert given.status_code == 200, "this server is never left alone"
    cloud.stop()


def test_a_fallback_that_leads_back_here_ends(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    back = f"http://127.0.0.1:{port}/v1"
    own = {"proxy_port": port, "litellm_master_key": KEY}
    with served(tmp_path, fallback_model="openai/default", fallback_api_base=back, **own) as (app, web):
        for dialect in DIALECTS:
            given = web.post(dialect, json=body_of(dialect, LONG) | {"model": "default"})
            assert given.status_code == 400 and given.headers[HEADER].endswith("; failed")
        proxy = app.proxy
        assert proxy is not None
        # The last one is written down after its answer is out.
        assert wait_until(lambda: proxy.sent().total == len(DIALECTS), 60)
