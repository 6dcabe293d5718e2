"""What the page fetches beside its feed: who may see it, and what it may have the server do."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from start_llm import __version__
from start_llm.api.server import ApiServer
from start_llm.core.report import StoredSegment, StoredTree
from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AUDIT_FILE, Audit
from start_llm.dashboard.observer import Outcome
from start_llm.dashboard.process_log import HIDDEN
from start_llm.models.catalog import EMBEDDED_NAME, StoredModel
from start_llm.models.device import NO_GPU
from start_llm.models.hub_search import HubModel
from start_llm.models.pull import PullError
from tests.api.conftest import CHAT, PATH, Serve
from tests.api.fakes import FIRST, REPORT, FakeService, hold
from tests.api.ops.test_page import ask, feed
from tests.proxy.node_stub import nodes

SECRET = "open-sesame-17"


def test_the_feed_tells_of_the_machine_to_who_sees_everything(server: ApiServer) -> None:
    """Who sees what else: `tests/api/test_table.py`."""
    for headers, told in (({"authorization": "Bearer mine"}, set()), ({}, {"log", "pull", "daily", "history"})):
        with feed(server, **headers) as messages:
            assert {"log", "pull", "daily", "history"} & next(messages).keys() == told


def test_with_a_key_whoever_has_it_sees_the_machine(serve: Serve) -> None:
    server = serve(api_key=SECRET)
    assert 'data-needs-key="yes"' in httpx.get(server.url).text
    assert httpx.get(f"{server.url}/page/feed").status_code == 401
    rows = httpx.get(server.url + "/page/settings", headers={"x-api-key": SECRET}).json()["settings"]
    values = {row["name"]: row["value"] for row in rows}
    assert values["API_KEY"] == "set, not shown" and values["LITELLM_MASTER_KEY"] == "" and values["PROXY"] == "on"


@pytest.mark.parametrize("threads", [1, 4])
def test_nodes_are_shown_without_their_keys(serve: Serve, threads: int) -> None:
    assert httpx.get(f"{serve().url}/page/nodes").json() == {"nodes": []}
    with nodes(1) as [stub]:
        stub.running = 3
        server = serve(nodes=f"{stub.url},http://127.0.0.1:9", nodes_api_key=SECRET, http_threads=threads)
        answer = httpx.get(f"{server.url}/page/nodes")
        found = {node["name"]: node for node in answer.json()["nodes"]}
        assert [node["state"] for node in found.values()] == ["ready", "ready", "gone"]
        assert found[stub.name]["running"] == 3 and found[stub.name]["models"] == ["served"]
        own = found[httpx.URL(server.url).netloc.decode()]
        assert own["version"] == __version__ and own["models"]
        assert stub.keys == {SECRET} and SECRET not in answer.text


def test_a_note_is_shown_to_who_made_the_request_and_what_is_stored_to_who_sees_everything(
    server: ApiServer,
) -> None:
    """The stored words may be those of another client: they are for who sees everything."""
    path = f"{server.url}/page/requests/{ask(server, authorization='Bearer mine')}"
    assert httpx.get(path, headers={"authorization": "Bearer theirs"}).status_code == 404
    for headers, expected in (({"authorization": "Bearer mine"}, ""), ({}, "words of somebody")):
        told = httpx.get(path, headers=headers).json()
        assert told["note"][1] == "System text, now:" and "stored" not in told["parted"]
        assert (told["parted"]["expected"], told["parted"]["found"]) == (expected, "words of the request")


def test_acts_are_posts_from_the_servers_own_page(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(server.page.pulls, "begin", begun.append)
    url, body = f"{server.url}/page/models/pull", {"name": "owner/model"}
    assert httpx.get(url).status_code == 405
    assert httpx.post(url, json=body, headers={"Origin": "http://localhost:1"}).status_code == 403
    assert httpx.post(url, data=body, headers={"Origin": server.url}).status_code == 415
    assert httpx.post(url, json={"name": 7}).status_code == 400
    assert begun == []
    assert httpx.post(url, json=body, headers={"Origin": server.url}).status_code == 202
    assert httpx.post(url, json=body).status_code == 202  # curl
    assert begun == ["owner/model"] * 2


def test_of_the_settings_the_level_of_the_log_can_change(server: ApiServer) -> None:
    url, before = f"{server.url}/page/settings", logging.getLogger("start_llm").level
    try:
        logging.getLogger("start_llm").setLevel(logging.NOTSET)  # in a program that has set up no logging
        assert {row["value"] for row in httpx.get(url).json()["settings"] if row["choices"]} == {"warning"}
        refused = httpx.post(url, json={"name": "API_KEY", "value": "x"})
        assert refused.status_code == 400 and "only LOG_LEVEL" in refused.text
        refused = httpx.post(url, json={"name": "LOG_LEVEL", "value": "loud"})
        assert refused.status_code == 400 and "debug, info, warning, error" in refused.text
        assert httpx.post(url, json=[]).status_code == 400
        assert httpx.post(url, json={"name": "LOG_LEVEL", "value": "info"}, headers={"Origin": server.url}).is_success
        rows = {row["name"]: row for row in httpx.get(url).json()["settings"]}
        assert rows["LOG_LEVEL"]["value"] == "info" and "debug" in rows["LOG_LEVEL"]["choices"]
        assert [name for name, row in rows.items() if row["choices"]] == ["LOG_LEVEL"]
        assert logging.getLogger("start_llm.anything").isEnabledFor(logging.INFO)
    finally:
        logging.getLogger("start_llm").setLevel(before)


def test_each_model_is_listed_once_and_says_what_it_needs(
    server: ApiServer, service: FakeService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "a large one"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    embedded = [StoredModel(f"/models/{EMBEDDED_NAME}-{kind}", tmp_path / kind, 9, 8192, ()) for kind in ("q4", "f32")]
    large = [StoredModel(str(path), path, 10**11, 4096, ()) for path in (folder, tmp_path / "link")]
    other = StoredModel(f"somebody/{EMBEDDED_NAME}", tmp_path / "other", 9, 8192, ())  # of the same name, from a hub
    monkeypatch.setattr("start_llm.api.ops.page.stored_models", lambda *places: [*embedded, *large, other])
    monkeypatch.setattr(server.metrics, "figures", lambda: {"models_memory_bytes": 10**10})
    card = replace(service.cards()[0], details={"source": EMBEDDED_NAME})
    monkeypatch.setattr(service, "cards", lambda: (card,))
    told = httpx.get(f"{server.url}/page/models").json()
    assert [model["name"] for model in told["models"]] == [EMBEDDED_NAME, str(folder), other.name]
    assert [model["loaded"] for model in told["models"]] == [True, False, False]
    assert [model["command"] for model in told["models"]] == [
        "start-llm serve",
        f"start-llm serve '{folder}'",
        f"start-llm serve {other.name}",
    ]
    assert told["memory"] == 10**10 < told["models"][1]["needs"]
    assert [model["hub"] for model in told["models"]] == [False, False, True]
    assert told["warning"] in {"", NO_GPU}
    assert all(model["needs"] > model["bytes"] for model in told["known"])


def test_agents_that_are_installed_are_told(server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pi").write_text("#!/bin/sh\n")
    (tmp_path / "pi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert httpx.get(f"{server.url}/page/agents").json() == {"installed": ["pi"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_is_cancelled_and_its_client_is_told(
    server: ApiServer, service: FakeService, stream: bool
) -> None:
    service.script = lambda request: [FIRST, hold]
    answers: list[httpx.Response] = []
    body = CHAT | {"stream": stream}
    asking = threading.Thread(target=lambda: answers.append(httpx.post(server.url + PATH, json=body)))
    asking.start()
    with feed(server) as messages:
        running = next(message["now"] for message in messages if message["now"])[0]["id"]
        path = f"{server.url}/page/requests/{running}/cancel"
        assert httpx.get(path).status_code == 405
        assert httpx.post(path, json={}, headers={"Origin": "http://localhost:1"}).status_code == 403
        assert httpx.post(path, json={}, headers={"authorization": "Bearer mine"}).status_code == 403
        assert next(messages)["now"], "it is still running"
        assert httpx.post(path, json={}, headers={"Origin": server.url}, timeout=20).status_code == 200
        asking.join(60)
        entry = next(message["ended"] for message in messages if message["ended"])[0]
    assert entry["status"] == 499 and "cancelled on the server's page" in entry["error"]
    assert answers[0].status_code == (200 if stream else 499)
    assert "cancelled on the server's page" in answers[0].text
    assert httpx.post(path, json={}).status_code == 404


def test_the_tree_comes_in_columns(server: ApiServer, service: FakeService) -> None:
    segment = StoredSegment(-1, 7, 100, True, 2.0, 3, 0.5)
    service.tree = StoredTree((segment,), (("talk", 0, 0),), 5, 10.0)
    told = httpx.get(server.url + "/page/stored").json()
    assert told["tokens"] == [7] and told["disk"] == [1] and told["conversations"] == [["talk", 0, 0]]
    assert told["left_out"] == 5 and told["parent"] == [-1]
    service.stored = Mock(side_effect=TimeoutError("it is being changed"))  # type: ignore[method-assign]
    assert httpx.get(server.url + "/page/stored").status_code == 503


def test_reuse_by_client_begins_with_what_an_earlier_server_wrote_down(serve: Serve, tmp_path: Path) -> None:
    written = Audit(tmp_path / "cache" / AUDIT_FILE, 1)
    written.ended(ChatRequest("a", "chat", "m", client="pi"), Outcome(200, 1.0, report=REPORT))
    written.close()
    with feed(serve()) as messages:
        (client,) = next(messages)["daily"]["clients"]
    assert client["name"] == "pi" and client["slots"][0][1:] == [1, 100, 16, 4]


def test_the_log_is_told_without_secrets(serve: Serve) -> None:
    server = serve(api_key=SECRET)
    log = logging.getLogger("start_llm.test_panels")
    with feed(server, authorization=f"Bearer {SECRET}") as messages:
        next(messages)
        log.warning("sent %s and Bearer abcd.efgh.1 and sk-12345678901234567890", SECRET)
        lines: list[str] = []
        while not any("test_panels" in line for line in lines):
            lines = next(messages)["log"]
    assert any(f"sent {HIDDEN} and Bearer {HIDDEN} and {HIDDEN}" in line for line in lines)
    server.stop(0)
    log.warning("after the end")
    assert not any("after the end" in line for line in server.page.log.after(0)[0])


def test_the_hub_is_searched_with_the_rule_of_what_fits(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [HubModel("owner/model", "", 7, 10, "4-bit", 4096, needs) for needs in (100, 101, None)]
    monkeypatch.setattr("start_llm.api.ops.page.search_hub", lambda words: found if words == "a b" else [])
    monkeypatch.setattr(server.metrics, "figures", lambda: {"models_memory_bytes": 100})
    told = httpx.get(f"{server.url}/page/models/search", params={"words": " a b "}).json()["models"]
    assert [model["fits"] for model in told] == [True, False, None] and told[0]["quantisation"] == "4-bit"
    assert httpx.get(f"{server.url}/page/models/search?words=%20").status_code == 400
    offline = Mock(side_effect=PullError("no hub is in reach"))
    monkeypatch.setattr("start_llm.api.ops.page.search_hub", offline)
    answer = httpx.get(f"{server.url}/page/models/search?words=x")
    assert answer.status_code == 503 and "no hub is in reach" in answer.text


def test_values_are_changed_and_models_removed_for_who_sees_everything(server: ApiServer) -> None:
    change, remove = f"{server.url}/page/models/change", f"{server.url}/page/models/remove"
    assert httpx.post(change, json={"name": "tiny"}).status_code == 400
    assert httpx.post(change, json={"name": "nobody", "changes": {"ttl": 1}}).status_code == 404
    assert httpx.post(remove, json={}).status_code == 400
    assert httpx.post(remove, json={"name": "owner/nothing"}).status_code == 404
