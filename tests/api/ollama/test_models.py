"""Ollama's words for models: fetched with progress, deleted, shown; the hub is one on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from start_llm.api.server import ApiServer
from start_llm.core.service import ModelCard
from start_llm.models import servers
from start_llm.models.catalog import snapshot
from start_llm.models.checkpoint import parameters_on_disk
from tests.api.conftest import Raw
from tests.api.fakes import FakeService
from tests.cli.places import checkpoint, safetensors
from tests.models.hub import Hub, running, use
from tests.waiting import until


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = checkpoint(tmp_path / "served")
    safetensors(folder / "model.safetensors", 1 << 20)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with running(folder) as found:
        use(monkeypatch, found.url)
        yield found


def pulled(server: ApiServer, name: str) -> list[dict[str, Any]]:
    answer = httpx.post(f"{server.url}/api/pull", json={"model": name}, timeout=60)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def delete(server: ApiServer, **body: Any) -> httpx.Response:
    return httpx.request("DELETE", f"{server.url}/api/delete", json=body, timeout=60)


def test_a_model_is_pulled_line_by_line_and_deleted(server: ApiServer, hub: Hub) -> None:
    first, *between, last = pulled(server, "hf.co/owner/model:latest")
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    size = sum(path.stat().st_size for path in hub.folder.iterdir())
    for line in between:
        if line == first:
            continue
        assert 0 <= line["completed"] <= line["total"] == size and line["digest"].startswith("sha256:")
    assert snapshot("owner/model") is not None
    whole = httpx.post(f"{server.url}/api/pull", json={"model": "owner/model", "stream": False}, timeout=60)
    assert whole.json() == {"status": "success"}
    gone = delete(server, model="owner/model")
    assert (gone.status_code, gone.text) == (200, "") and snapshot("owner/model") is None
    assert delete(server, name="owner/model").status_code == 404


def test_a_model_that_another_server_of_the_user_has_loaded_is_not_deleted(
    server: ApiServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This server is among those that run: it is not asked, since its only thread may be the one that waits."""
    assert pulled(server, "owner/model")[-1] == {"status": "success"}
    main, card = ({"id": name, "details": {"state": "ready", "source": f"owner/{name}"}} for name in ("main", "model"))
    told = {f"http://127.0.0.1:{port}": [main, card] for port in (8123, server.port)}
    monkeypatch.setattr(servers, "running_ports", lambda _: [server.port, 8123])
    monkeypatch.setattr(servers, "model_cards", lambda url, *_: told[url])
    for kept in (
        delete(server, model="owner/model"),
        httpx.post(f"{server.url}/page/models/remove", json={"name": "owner/model"}, timeout=60),
    ):
        assert kept.status_code == 409 and "owner/model is loaded on port 8123; `" in kept.text
    told["http://127.0.0.1:8123"].pop()
    assert delete(server, model="owner/model").status_code == 200 and snapshot("owner/model") is None


@pytest.mark.parametrize("setting", ["embedding_model", "draft_model"])
def test_a_model_that_a_setting_names_is_not_deleted(serve: Callable[..., ApiServer], hub: Hub, setting: str) -> None:
    server = serve(**{setting: "owner/model"})
    assert pulled(server, "owner/model")[-1] == {"status": "success"}
    kept = delete(server, model="owner/model")
    assert kept.status_code == 409 and f"{setting.upper()} names owner/model" in kept.text
    assert snapshot("owner/model") is not None


def test_what_cannot_be_pulled_says_why(server: ApiServer, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no model owner/other" in pulled(server, "owner/other")[-1]["error"]
    use(monkeypatch, "http://127.0.0.1:9")
    assert "Hugging Face cannot be reached" in pulled(server, "owner/model")[-1]["error"]
    asked = {"model": "owner/model", "stream": False}
    refused = httpx.post(f"{server.url}/api/pull", json=asked, timeout=60)
    assert refused.status_code == 503 and "Hugging Face cannot be reached" in refused.json()["error"]
    refused = httpx.post(f"{server.url}/api/pull", json={"model": "llama3:8b"}, timeout=60)
    assert refused.status_code == 400 and "is a name of Ollama" in refused.json()["error"]


def test_a_client_that_waits_for_the_whole_ends_its_fetch_when_it_leaves(
    server: ApiServer, connect: Callable[[ApiServer], Raw]
) -> None:
    pulls = server.page.pulls
    pulls._fetch = lambda name, progress, **more: spin(progress)
    waiting = connect(server).post("/api/pull", {"model": "owner/model", "stream": False})
    until(lambda: (pulls.state() or {}).get("state") == "running")
    waiting.close()
    until(lambda: (pulls.state() or {})["state"] == "stopped")


def test_a_client_that_leaves_ends_the_fetch_that_it_began_and_no_other(server: ApiServer) -> None:
    pulls = server.page.pulls
    pulls._fetch = lambda name, progress, **more: spin(progress)
    with httpx.stream("POST", f"{server.url}/api/pull", json={"model": "owner/model"}, timeout=60) as begun:
        next(begun.iter_lines())
        with httpx.stream("POST", f"{server.url}/api/pull", json={"model": "owner/model"}, timeout=60) as other:
            next(other.iter_lines())
        assert httpx.post(f"{server.url}/api/pull", json={"model": "owner/second"}, timeout=60).status_code == 409
        assert (pulls.state() or {})["state"] == "running"
    until(lambda: (pulls.state() or {})["state"] == "stopped")


def spin(progress: Callable[[str, float], None]) -> None:
    while not threading.Event().wait(0.01):
        progress("download", 0.1)


@pytest.mark.parametrize(("name", "says"), [("create", "START_LLM_CACHE_DIR"), ("copy", "MODEL_MAP"), ("push", "hf")])
def test_what_is_not_done_says_what_to_do(server: ApiServer, name: str, says: str) -> None:
    answer = httpx.post(f"{server.url}/api/{name}", json={"model": "a", "source": "a", "destination": "b"})
    assert answer.status_code == 501 and set(answer.json()) == {"error"} and says in answer.json()["error"]


def test_the_size_and_the_quantisation_are_read_from_the_files(
    server: ApiServer, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"a.weight": ((64, 16), np.uint32), "a.scales": ((64, 2), np.float16), "head": ((10, 10), np.float16)}
    save_file({name: np.zeros(*given) for name, given in arrays.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": 4, "group_size": 64}}))
    card = ModelCard("tiny", 0, 8, details={"source": str(tmp_path)})
    monkeypatch.setattr(service, "cards", lambda: (card,))
    details = httpx.post(f"{server.url}/api/show", json={"model": "tiny"}).json()["details"]
    assert details["quantization_level"] == "4-bit"
    assert details["parameter_size"] == "0M" and parameters_on_disk(tmp_path) == 64 * 16 * 8 + 100, "without scales"
