"""Several models on one server: loaded by name, in and out, side by side; on oracle checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from start_llm.core.errors import NotSupported
from start_llm.core.modelmap import PROXIED
from start_llm.engine.assembly import ModelBuilder
from start_llm.host.pressure import Pressure
from start_llm.modelpool import kinds
from start_llm.modelpool import loader as poolloader
from tests.integration.live import ENDLESS, TOOLS, WAIT, Live, live
from tests.integration.pooled import BUDGET_FOR_TWO, TURN, Asking, admin, ask, link_oracles, states
from tests.oracle import build_oracle
from tests.unique import unique
from tests.waiting import until


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server on the plain oracle that has room for all."""
    cache = tmp_path_factory.mktemp("cache")
    link_oracles(folders, cache)
    broken = cache / "models" / "broken"
    shutil.copytree(folders["hybrid"], broken)
    config = json.loads((broken / "config.json").read_text("utf-8"))
    (broken / "config.json").write_text(json.dumps(config | {"layer_kinds": ["?"]}), "utf-8")
    with live(
        folders["plain"], cache, model_map="small-*=oracle-windowed,@side=oracle-hybrid", kv_disk_dir="auto"
    ) as server:
        yield server


def test_a_model_in_the_folder_is_loaded_when_it_is_asked_for(plain: Live) -> None:
    assert ask(plain, "oracle-hybrid").json()["model"] == "oracle-hybrid"
    assert states(plain)["oracle-hybrid"] == "ready" and states(plain)["oracle-plain"] == "ready"
    assert ask(plain).json()["model"] == "oracle-plain"
    body = {"model": "oracle-windowed", "messages": [{"role": "user", "content": TURN}]}
    count = plain.post("/v1/messages/count_tokens", json=body)
    assert count.status_code == 200 and states(plain)["oracle-windowed"] == "ready"
    assert "models_loaded 3" in plain.get("/metrics").text


@pytest.mark.parametrize("proxied", ["", PROXIED])
def test_the_answer_says_which_model_gave_it_whatever_the_client_called_it(plain: Live, proxied: str) -> None:
    for asked, meant in {
        "small-fast": "oracle-windowed",
        "openai/small-fast": "oracle-windowed",
        "openai/oracle-hybrid": "oracle-hybrid",
        "claude-opus-4-1": "oracle-plain",
        "gpt-7": "oracle-plain",
        "": "oracle-plain",
    }.items():
        assert ask(plain, f"{proxied}{asked}").json()["model"] == meant, asked
    refused = ask(plain, f"{proxied}nobody")
    assert refused.status_code == 404 and refused.json()["error"]["message"].startswith("model='nobody': this server")


def test_a_side_request_goes_to_its_own_model_and_a_conversations_turn_never_does(plain: Live) -> None:
    title = [{"role": "system", "content": "Write a title."}, {"role": "user", "content": TURN}]
    for asked in ("default", "oracle-plain", "claude-opus-4-1"):
        assert plain.chat(title, model=asked, max_tokens=20)["body"]["model"] == "oracle-hybrid"
    assert plain.chat(title, model="oracle-windowed", max_tokens=20)["body"]["model"] == "oracle-windowed"
    for more in ({}, {"max_tokens": 20, "tools": TOOLS}, {"max_tokens": 20, "tools": TOOLS, "tool_choice": "none"}):
        assert plain.chat(title, **more)["body"]["model"] == "oracle-plain", more
    body = {"input": TURN, "instructions": "Write a title.", "max_output_tokens": 20, "model": "default"}
    for tools, meant in (([], "oracle-hybrid"), ([{"type": "web_search"}], "oracle-plain")):
        answer = plain.post("/v1/responses", json=body | {"tools": tools}).json()
        assert answer["model"] == meant, tools


def test_an_alias_is_looked_up_as_the_model_that_it_means(plain: Live) -> None:
    for asked, meant in {"small-fast": "oracle-windowed", "claude-opus-4-1": "oracle-plain"}.items():
        card = plain.get(f"/v1/models/{asked}").json()
        assert card["id"] == asked and card["details"]["source"].endswith(meant)


@pytest.mark.parametrize(
    "name", ["mistral-large", "/etc", "../oracle-hybrid", "x" * 300, "owner/model", "oracle-hybrid/"]
)
def test_no_name_loads_what_is_not_listed(plain: Live, folders: dict[str, Path], name: str) -> None:
    before = states(plain)
    response = ask(plain, name)
    assert response.status_code == 404 and "'oracle-plain'" in response.json()["error"]["message"]
    assert len(response.text) < 1000
    assert states(plain) == before


def test_a_path_that_is_a_model_but_not_listed_is_not_loaded(plain: Live, tmp_path: Path) -> None:
    stray = build_oracle(tmp_path / "stray")
    for name in (str(stray), f"openai/{stray}", f"~/../{stray}"):
        assert admin(plain, "load", model=name).status_code == 404


def test_a_model_that_cannot_be_loaded_says_why_and_is_left_alone_for_a_while(plain: Live) -> None:
    first = admin(plain, "load", model="broken")
    assert first.status_code == 500 and "broken could not be loaded" in first.json()["error"]["message"]
    again = ask(plain, "broken", stream=True)
    assert again.status_code == 500 and "is tried again in" in again.json()["error"]["message"]
    for answer in (first, again):
        assert answer.headers["x-start-llm-refusal"] == "model_not_loadable", "another model could answer it"
    assert states(plain)["broken"] == "failed"
    assert ask(plain).json()["model"] == "oracle-plain"


def test_loading_unloading_and_pinning_by_request(plain: Live) -> None:
    loaded = admin(plain, "load", model="oracle-hybrid")
    assert loaded.status_code == 200 and loaded.json()["details"]["state"] == "ready"
    plain.chat([{"role": "user", "content": "word " * 300}], model="oracle-hybrid")
    one = plain.get("/v1/models/oracle-hybrid").json()
    assert one["details"]["kv_bytes"] > 0 and one["details"]["weight_bytes"] > 0 and not one["details"]["pinned"]
    assert admin(plain, "pin", model="oracle-hybrid").json()["details"]["pinned"]
    assert not admin(plain, "pin", model="oracle-hybrid", pinned=False).json()["details"]["pinned"]
    gone = admin(plain, "unload", model="oracle-hybrid").json()
    assert gone["details"]["state"] == "stored" and gone["details"]["kv_bytes"] == 0
    assert admin(plain, "unload", model="oracle-hybrid").json()["details"]["state"] == "stored"
    for what, body, status in (("load", {}, 400), ("pin", {"model": "oracle-plain", "pinned": 3}, 400)):
        assert admin(plain, what, **body).status_code == status
    elsewhere = {"Origin": "http://elsewhere.example"}
    refused = plain.post("/v1/models/unload", json={"model": "oracle-plain"}, headers=elsewhere)
    assert refused.status_code == 403 and states(plain)["oracle-plain"] == "ready"


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer another"}, {"X-Forwarded-For": "192.0.2.1"}, {"Origin": "http://127.0.0.1:1"}],
    ids=["another key", "another machine", "another page of this machine"],
)
def test_who_may_not_see_everything_changes_no_model(plain: Live, headers: dict[str, str]) -> None:
    before = states(plain)
    for what in ("load", "unload", "pin"):
        url, body = f"{plain.url}/v1/models/{what}", {"model": "oracle-windowed"}
        assert httpx.post(url, json=body, headers=headers).status_code == 403
    assert states(plain) == before


def test_a_model_at_work_is_not_unloaded(plain: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "[[long 400]]"}]
    body = {"model": "oracle-hybrid", "messages": messages, "stream": True, **ENDLESS}
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.1")  # 40 s, unless that is taken away
    with httpx.stream("POST", f"{plain.url}/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = admin(plain, "unload", model="oracle-hybrid")
        assert refused.status_code == 409 and "requests at work or waiting: 1" in refused.json()["error"]["message"]
        monkeypatch.delenv("ORACLE_SLEEP_PER_STEP")
        assert "data: [DONE]" in list(lines)
    until(lambda: admin(plain, "unload", model="oracle-hybrid").status_code == 200)


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("windowed", marks=pytest.mark.slow)])
def test_a_conversation_whose_model_went_and_came_back_computes_what_is_new(serve: Any, kind: str) -> None:
    with serve(max_loaded_models=1) as server:
        names = (f"oracle-{kind}", "default")
        talks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(2):
            for name in names:
                report = server.turn(talks[name], f"{unique()} {'word ' * 400} ", model=name)
                assert report["computed"] <= 1.05 * report["new"], (turn, name, report)
                assert sorted(states(server).values()).count("ready") == 1


def test_what_does_not_fit_pushes_out_what_was_not_used_for_longest_but_never_a_pinned_one(serve: Any) -> None:
    with serve(
        pool_memory_bytes=BUDGET_FOR_TWO, pinned_models="oracle-hybrid", preload_models="oracle-hybrid"
    ) as server:
        until(lambda: states(server)["oracle-hybrid"] == "ready")
        assert states(server)["oracle-plain"] == "ready"
        assert ask(server, "oracle-windowed").status_code == 200
        assert states(server) == {"oracle-plain": "stored", "oracle-hybrid": "ready", "oracle-windowed": "ready"}
        assert server.get("/health").json()["status"] == "ok"
        server.chat([{"role": "user", "content": TURN}])
        assert states(server) == {"oracle-plain": "ready", "oracle-hybrid": "ready", "oracle-windowed": "stored"}
        admin(server, "pin", model="default")
        full = ask(server, "oracle-windowed")
        assert full.status_code == 507, full.text
        assert re.search(r"oracle-plain \([\d.]+ .?B, pinned\)", full.json()["error"]["message"])
        admin(server, "pin", model="default", pinned=False)
        assert ask(server, "oracle-windowed").status_code == 200


class Gate:
    """Holds the loader's thread before a model is read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        read = ModelBuilder.read

        def held(builder: Any, *args: Any) -> Any:
            self.reached.set()
            assert self.open.wait(WAIT)
            return read(builder, *args)

        patch.setattr(ModelBuilder, "read", held)


def test_who_waits_for_a_model_sees_life_and_may_leave(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "oracle-hybrid", "messages": [{"role": "user", "content": "[[truth]]"}], "stream": True}
    with serve(sse_ping_seconds=0.5) as server:
        gate = Gate(monkeypatch)
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body) as leaving:
            assert gate.reached.wait(WAIT)
            parts = leaving.iter_raw()
            assert any(b": ping" in part for part in parts), "signs of life, as in a long prefill"
        with httpx.stream("POST", url, json=body) as staying:
            parts = staying.iter_raw()
            assert any(b": ping" in part for part in parts)
            assert server.chat([{"role": "user", "content": TURN}]), "the other model answers meanwhile"
            assert admin(server, "unload", model="oracle-hybrid").status_code == 409
            gate.open.set()
            assert b"[DONE]" in b"".join(parts)
        assert states(server)["oracle-hybrid"] == "ready"
        until(lambda: admin(server, "unload", model="oracle-hybrid").status_code == 200)
        gate.open.clear()
        gate.reached.clear()
        with httpx.stream("POST", url, json=body) as gone:
            assert gate.reached.wait(WAIT)
            parts = gone.iter_raw()
            next(parts)
        gate.open.set()
        until(lambda: states(server)["oracle-hybrid"] in {"ready", "stored"})
        until(lambda: admin(server, "unload", model="oracle-hybrid").status_code == 200)


def test_a_loaded_model_answers_while_as_many_as_may_wait_for_another(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(http_threads=4, model_probe="off") as server:
        gate = Gate(monkeypatch)
        waiting = [Asking(server, "oracle-hybrid") for _ in range(3)]
        try:
            registry = server.app.pool._registry
            until(lambda: sum(len(entry.waiting) for entry in registry.entries()) == 3)
            assert states(server)["oracle-hybrid"] == "loading"
            assert ask(server, "default").status_code == 200
            for model in ("oracle-hybrid", "oracle-windowed"):
                refused = ask(server, model)
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0, refused.text
                assert "HTTP_THREADS" in refused.json()["error"]["message"]
            assert server.get("/health").status_code == 200
            assert ask(server, "default").status_code == 200
        finally:
            gate.open.set()
        assert [each.answer().status_code for each in waiting] == [200] * 3
        assert ask(server, "oracle-windowed").status_code == 200


def test_a_server_that_ends_while_a_model_is_loaded_ends(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "oracle-hybrid", "messages": [{"role": "user", "content": TURN}]}
    answers: list[int] = []
    with serve() as server:
        gate = Gate(monkeypatch)
        url = f"{server.url}/v1/chat/completions"

        def ask() -> None:
            try:
                answers.append(httpx.post(url, json=body).status_code)
            except httpx.TransportError:  # a busy machine: the server was gone before it could say so
                answers.append(503)

        asking = threading.Thread(target=ask)
        asking.start()
        assert gate.reached.wait(WAIT)
        gate.open.set()
    asking.join(WAIT)
    assert answers in ([503], [200])


def test_a_model_that_could_not_be_loaded_leaves_its_memory(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[Any]] = []
    really = kinds.make_handle

    def refuse(settings: Any, clients: Any, runtime: Any, *rest: Any) -> Any:
        if runtime.loaded.name != "oracle-hybrid":
            return really(settings, clients, runtime, *rest)
        models.append(weakref.ref(runtime.loaded.model))
        raise NotSupported("Its chat template cannot be used.")

    monkeypatch.setattr(kinds, "make_handle", refuse)
    with serve() as server:
        assert [admin(server, "load", model="oracle-hybrid").status_code for _ in range(3)] == [501] * 3
        assert len(models) == 1, "it is not tried again so soon"
        until(lambda: models[0]() is None)
        assert "models_loaded 1" in server.get("/metrics").text


def weights_of(server: Live, name: str) -> weakref.ref[Any]:
    entry = next(each for each in server.app.pool._registry.entries() if each.name == name)
    assert entry.runtime is not None
    return weakref.ref(entry.runtime.loaded.model)


def test_a_model_that_was_there_while_the_main_one_went_leaves_its_memory_too(plain: Live) -> None:
    assert admin(plain, "load", model="oracle-hybrid").status_code == 200
    hybrid = weights_of(plain, "oracle-hybrid")
    for name in ("oracle-plain", "oracle-hybrid"):
        assert admin(plain, "unload", model=name).status_code == 200
    assert hybrid() is None


def test_weights_that_something_holds_a_moment_longer_are_waited_for(
    plain: Live, caplog: pytest.LogCaptureFixture
) -> None:
    assert admin(plain, "load", model="oracle-hybrid").status_code == 200
    hybrid = weights_of(plain, "oracle-hybrid")
    holder = [hybrid()]
    later = threading.Timer(0.3, holder.clear)
    later.start()
    assert admin(plain, "unload", model="oracle-hybrid").status_code == 200
    assert hybrid() is None and "still holds" not in caplog.text
    later.join(WAIT)


def test_weights_that_something_holds_for_ever_are_told_of(
    plain: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poolloader, "LINGER_SECONDS", 0.05)
    assert admin(plain, "load", model="oracle-hybrid").status_code == 200
    holder = weights_of(plain, "oracle-hybrid")()
    assert admin(plain, "unload", model="oracle-hybrid").status_code == 200
    assert "oracle-hybrid was unloaded, but something still holds its weights" in caplog.text
    assert holder is not None


@pytest.mark.parametrize(
    "where", ["start_llm.prompt.pipeline.Pipeline.close", "start_llm.prompt.recorder.Recorder.close"]
)
@pytest.mark.thorough
def test_a_fault_while_a_model_is_unloaded_does_not_bar_it(
    serve: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with serve() as server:
        assert admin(server, "load", model="oracle-hybrid").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(where, Mock(side_effect=RuntimeError("a fault")))
            assert admin(server, "unload", model="oracle-hybrid").json()["details"]["state"] == "stored"
        assert server.chat([{"role": "user", "content": TURN}], model="oracle-hybrid")["message"]["content"]
        assert states(server)["oracle-hybrid"] == "ready"


def test_a_fault_of_the_loader_is_told_to_who_waits(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as server:
        with monkeypatch.context() as patch:
            patch.setattr(poolloader.Loader, "_load", Mock(side_effect=OSError("the disk is gone")))
            answer = admin(server, "load", model="oracle-hybrid")
        assert answer.status_code == 500 and "the disk is gone" in answer.json()["error"]["message"]
        assert states(server)["oracle-hybrid"] == "failed" and states(server)["oracle-plain"] == "ready"


def test_a_models_own_file_says_when_it_goes_and_whether_it_may(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("start_llm.modelpool.resolve.FOLDER", tmp_path)
    (tmp_path / "oracle-hybrid.toml").write_text("pinned = true\n")
    with serve() as server:
        pinned = {model["id"]: model["details"]["pinned"] for model in server.get("/v1/models").json()["data"]}
        assert pinned["oracle-hybrid"] and not pinned["oracle-windowed"]
        (tmp_path / "oracle-windowed.toml").write_text("ttl = 0.5\n")  # read when it is loaded, not before
        assert ask(server, "oracle-windowed").status_code == 200
        assert ask(server, "oracle-hybrid").status_code == 200
        until(lambda: states(server)["oracle-windowed"] == "stored")
        assert states(server)["oracle-plain"] == states(server)["oracle-hybrid"] == "ready"


def test_unused_models_go_while_memory_is_critically_short(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("start_llm.modelpool.pool.UNUSED_SECONDS", 0.1)
    with serve() as server:
        assert ask(server, "oracle-hybrid").status_code == 200

        def told(level: Pressure) -> bool:
            server.app.pool.press(level)
            return states(server)["oracle-hybrid"] == "stored"

        assert not told(Pressure.WARNING)
        until(lambda: told(Pressure.CRITICAL))
        assert states(server)["oracle-plain"] == "ready", "the main model stays"
