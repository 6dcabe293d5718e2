"""Who waits for room, who goes for whom, and what becomes of models that cannot be read."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.engine.assembly import ModelBuilder
from start_llm.modelpool import resolve as names
from start_llm.modelpool.loader import Loader
from tests.integration.live import ENDLESS, WAIT, Live
from tests.integration.pooled import TURN, Asking, admin, ask, states
from tests.oracle import build_oracle, expected_truth
from tests.waiting import until

pytestmark = pytest.mark.thorough

ASKED = [{"role": "user", "content": "[[truth]]"}]


@contextmanager
def at_work(server: Live, name: str = "default") -> Iterator[Callable[[], list[str]]]:
    """A stream of this model that goes on until it is read. Gives what reads the rest of it."""
    body = {"model": name, "messages": [{"role": "user", "content": "[[long 100000]]"}], "stream": True} | ENDLESS
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lambda: list(lines)


def test_a_model_waits_until_the_one_in_its_place_has_nothing_to_do(serve: Any) -> None:
    with serve(max_loaded_models=1, pool_wait_seconds=10 * WAIT) as server:
        with at_work(server):
            first = Asking(server, "oracle-hybrid")
            until(lambda: states(server)["oracle-hybrid"] == "loading")
            until(lambda: len(server.app.pool._registry.room.entries) == 1)
            second = Asking(server, "oracle-windowed")
            until(lambda: len(server.app.pool._registry.room.entries) == 2)
            assert states(server)["oracle-plain"] == "ready"
            names = [entry.name for entry in server.app.pool._registry.room.entries]
            assert names == ["oracle-hybrid", "oracle-windowed"]
        for asking in (first, second):
            response = asking.answer()
            assert response.status_code == 200, response.text
            data = response.json()
            assert data["choices"][0]["message"]["content"] == expected_truth(server.prompts[data["id"]])
        assert server.app.pool._registry.room.entries == []
        assert states(server)["oracle-windowed"] == "ready", "who waited for longest came first"


def test_who_waited_long_enough_is_told_the_numbers(serve: Any) -> None:
    with serve(max_loaded_models=1, pool_wait_seconds=0.2) as server, at_work(server):
        full = ask(server, "oracle-hybrid")
        assert full.status_code == 507
        assert re.search(r"oracle-plain \([\d.]+ .?B, at work\)", full.json()["error"]["message"])
        until(lambda: states(server)["oracle-hybrid"] == "stored")
        assert server.app.pool._registry.room.entries == []


def test_nobody_waits_for_room_that_a_pinned_model_takes(serve: Any) -> None:
    with serve(max_loaded_models=1, pool_wait_seconds=10 * WAIT, pinned_models="oracle-plain") as server:
        with at_work(server):
            assert ask(server, "oracle-hybrid").status_code == 507
        assert ask(server, "oracle-hybrid").status_code == 507


def test_who_leaves_waits_no_more_and_holds_nobody_up(serve: Any) -> None:
    body = {"model": "oracle-hybrid", "messages": ASKED, "stream": True}
    with serve(max_loaded_models=1, pool_wait_seconds=10 * WAIT, sse_ping_seconds=0.5) as server:
        with at_work(server):
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as leaving:
                assert any(b": ping" in part for part in leaving.iter_raw())
                assert len(server.app.pool._registry.room.entries) == 1
            until(lambda: server.app.pool._registry.room.entries == [])
            assert states(server)["oracle-hybrid"] == "stored"
        assert ask(server, "oracle-windowed").status_code == 200


def test_nobody_goes_for_a_model_that_cannot_be_read(serve: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "models" / "broken"
    shutil.copytree(folders["hybrid"], broken)
    (broken / "tokenizer.json").write_text("{", "utf-8")
    with serve(max_loaded_models=1) as server:
        server.chat([{"role": "user", "content": TURN}])
        refused = admin(server, "load", model="broken")
        assert refused.status_code == 501 and "broken: Expecting" in refused.json()["error"]["message"]
        assert states(server)["oracle-plain"] == "ready"


def test_a_model_that_is_deleted_is_served_until_it_goes(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "LISTING_SECONDS", 0.0)
    monkeypatch.setattr(names, "LEAST_SECONDS", 0.0)
    passing = build_oracle(tmp_path / "models" / "passing")
    with serve() as server:
        assert admin(server, "load", model="passing").status_code == 200
        shutil.rmtree(passing)
        assert states(server)["passing"] == "ready"
        assert server.chat([{"role": "user", "content": TURN}], model="passing")["body"]["model"] == "passing"
        _unload(server, "passing")
        assert "passing" not in states(server)
        assert ask(server, "passing").status_code == 404


def test_a_model_that_is_deleted_while_it_is_asked_for_is_refused_in_a_sentence(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SEEN_SECONDS", 3600.0)  # it is found before it has gone
    monkeypatch.setattr(names.ModelListing, "look_again", lambda _: None)
    passing = build_oracle(tmp_path / "models" / "passing")
    with serve(max_loaded_models=1) as server:
        assert states(server)["passing"] == "stored"
        shutil.rmtree(passing)
        refused = ask(server, "passing")
        assert refused.status_code == 404 and "there is no such folder" in refused.text
        assert states(server)["oracle-plain"] == "ready"


def test_a_load_that_hangs_is_told_and_stops_nobody_else(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, leave = threading.Event(), threading.Event()
    read = ModelBuilder.read

    def hangs(builder: Any, *args: Any) -> Any:
        if len(args) > 1:  # else it is the main model
            reached.set()
            assert leave.wait(10 * WAIT)
        return read(builder, *args)

    monkeypatch.setattr(ModelBuilder, "read", hangs)
    with serve() as server:
        waiting = Asking(server, "oracle-hybrid")
        assert reached.wait(WAIT)
        server.app.pool._loader.progress.limit = 0.2
        for response in (waiting.answer(), ask(server, "oracle-windowed")):
            assert response.status_code == 503
            assert "oracle-hybrid is being loaded or unloaded, and nothing of it has moved" in response.text
        assert ask(server, "oracle-plain").status_code == 200
        server.app.pool._loader.progress.limit = 10 * WAIT
        leave.set()
        assert ask(server, "oracle-windowed").status_code == 200


def test_other_weights_in_the_same_folder_never_find_the_old_ones_kv(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a model that lies on the disk, and of one that a link leads to. However short ago the disk was looked
    at: what a link led to then is not loaded under the name of what it leads to now."""
    monkeypatch.setattr(names, "SEEN_SECONDS", 3600.0)
    first, second = build_oracle(tmp_path / "a", "plain"), build_oracle(tmp_path / "b", "hybrid")
    place, link = tmp_path / "models" / "place", tmp_path / "models" / "link"
    place.parent.mkdir(exist_ok=True)
    shutil.copytree(first, place)
    link.symlink_to(first)
    talk = [{"role": "user", "content": f"{'word ' * 300} [[truth]]"}]
    with serve() as server:
        for name in ("place", "link"):
            for _ in range(2):
                assert _right(server, name, talk)["reused"] >= 0
            assert _right(server, name, talk)["reused"] > 0
            _unload(server, name)
        shutil.rmtree(place)
        shutil.copytree(second, place)
        link.unlink()
        link.symlink_to(second)
        for name in ("link", "place"):
            assert _right(server, name, talk)["reused"] == 0
            server.app.pool._names.listing.look_again()
            assert _right(server, name, talk)["reused"] > 0


def test_a_link_that_is_changed_while_its_load_waits_puts_no_other_model_under_its_key(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [build_oracle(tmp_path / "a", "plain"), build_oracle(tmp_path / "b", "hybrid")]
    link = tmp_path / "models" / "link"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folders[0])
    reached, leave = threading.Event(), threading.Event()
    load = Loader._load

    def waits(loader: Loader, entry: Any) -> None:
        reached.set()
        assert entry.is_starting or leave.wait(10 * WAIT)
        load(loader, entry)

    monkeypatch.setattr(Loader, "_load", waits)
    with serve() as server:
        reached.clear()
        waiting = Asking(server, "link")
        assert reached.wait(WAIT)
        link.unlink()
        link.symlink_to(folders[1])
        leave.set()
        assert waiting.answer().status_code == 200
        until(lambda: ask(server, "link").status_code == 200 and len(_loaded(server)) == 3)
        assert all(Path(key) == folder.resolve() for key, folder in _loaded(server).items() if key)


def _loaded(server: Live) -> dict[str, Path]:
    """Which folder was loaded under which key."""
    entries = server.app.pool._registry.entries()
    return {entry.key: entry.runtime.loaded.folder for entry in entries if entry.runtime is not None}


def _unload(server: Live, name: str) -> None:
    """A client has its answer before the server has let go of the model; one in use is not unloaded."""
    until(lambda: not any(entry.users for entry in server.app.pool._registry.entries()))
    assert admin(server, "unload", model=name).status_code == 200


def _right(server: Live, name: str, talk: list[dict[str, Any]]) -> dict[str, Any]:
    *before, asked = talk
    return server.turn(before, asked["content"].removesuffix("[[truth]]"), model=name)


def test_copies_of_one_model_under_two_names_answer_side_by_side(serve: Any, tmp_path: Path) -> None:
    """Their fingerprint is the same, and so would be their folder on the disk."""
    for name in ("one", "two"):
        build_oracle(tmp_path / "models" / name, "hybrid")
    with serve() as server:
        for turn in range(3):
            for name in ("one", "two"):
                _right(server, name, [{"role": "user", "content": f"turn {turn} {'word ' * 200} [[truth]]"}])
        for name in ("one", "two", "one"):
            _unload(server, name)
            _right(server, name, [{"role": "user", "content": f"back {'word ' * 200} [[truth]]"}])


def test_a_hundred_names_at_once_harm_nobody(serve: Any) -> None:
    """Most of them mean no model; the others have their turn."""
    with serve(max_loaded_models=2, http_threads=40, pool_wait_seconds=10 * WAIT) as server:
        wanted = [f"nobody-{number}" for number in range(80)]
        wanted += ["oracle-plain", "oracle-hybrid", "oracle-windowed", "openai/oracle-hybrid"] * 5
        found = [(name, Asking(server, name)) for name in wanted]
        for name, asking in found:
            answer = asking.answer()
            assert answer.status_code == (404 if name.startswith("nobody") else 200), (name, answer.text)
        assert list(states(server).values()).count("ready") <= 2


def test_unloading_while_requests_begin_spoils_none(serve: Any) -> None:
    """Either the request holds the model, or it gets it back."""
    talk = [{"role": "user", "content": f"{'word ' * 200} [[truth]]"}]
    over = threading.Event()
    refused: list[int] = []

    def unload() -> None:
        while not over.is_set():
            refused.append(admin(server, "unload", model="oracle-hybrid").status_code)

    with serve() as server:
        unloading = threading.Thread(target=unload)
        unloading.start()
        try:
            for _ in range(8):
                _right(server, "oracle-hybrid", talk)
        finally:
            over.set()
            unloading.join(WAIT)
    assert set(refused) <= {200, 409} and 200 in refused
