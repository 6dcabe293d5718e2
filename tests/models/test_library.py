"""Models that are fetched, removed and given values while a server runs; the hub is one on loopback."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from start_llm.api.ollama.models import OllamaModels
from start_llm.core.errors import BadRequest, Conflict, NotFound, NotSupported
from start_llm.core.service import ModelCard
from start_llm.models import library, overrides
from start_llm.models.background import Progress
from start_llm.models.checkpoint import is_path
from start_llm.models.library import Library, Pulls
from start_llm.models.overrides import FOLDER, read_overrides, write_overrides
from start_llm.models.pull import Pulled, PullError
from tests.api.fakes import FakeService
from tests.cli.places import checkpoint, safetensors
from tests.models.hub import Hub, running, use
from tests.waiting import until


class Fetching:
    """Takes the place of `models.pull.pull`; goes on when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, name: str, progress: Callable[[str, float], None], **more: Any) -> Any:
        progress("download", 0.25)
        assert self.go.wait(30)
        progress("download", 0.5)
        return Pulled(None, 10**9, 10**9, "0123456789abcdef")  # type: ignore[arg-type]


def ended(pulls: Pulls) -> dict[str, Any]:
    until(lambda: (pulls.state() or {"state": "running"})["state"] != "running")
    return pulls.state() or {}


def test_a_fetch_that_fails_shows_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off(name: str, progress: Progress, **_: Any) -> Pulled:
        progress("download", 0.5)
        progress("download", -1.0)
        raise PullError("it was broken off")

    monkeypatch.setattr(library, "TELL_SECONDS", 0.0)
    pulls = Pulls(lambda: None, breaks_off)
    pulls.begin("owner/model")
    state = ended(pulls)
    assert (state["state"], state["part"], state["detail"]) == ("failed", 0.5, "it was broken off")


def test_whoever_has_begun_an_earlier_fetch_does_not_stop_the_next_one() -> None:
    fetching = Fetching()
    pulls = Pulls(lambda: None, fetching)
    lines = OllamaModels(Shelf(), Library(Shelf(), pulls))._progress(pulls.begin("owner/model"), begun=True)
    next(lines)
    with pytest.raises(Conflict, match="owner/model is being fetched"):
        pulls.begin("owner/other")
    pulls.stop()
    fetching.go.set()
    assert ended(pulls)["state"] == "stopped"
    fetching.go.clear()
    pulls.begin("owner/other")
    lines.close()  # type: ignore[attr-defined]
    fetching.go.set()
    state = ended(pulls)
    assert (state["name"], state["state"], state["part"]) == ("owner/other", "done", 1.0)
    assert state["detail"] == "1.0 GB at 0123456789ab."


@pytest.mark.parametrize(
    "name", ["", " ", "/etc", "~/models", "../x", "a", "llama3:8b", "x.gguf", "ä" * 200, "a/" + "b" * 300]
)
def test_what_is_no_models_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="name="):
        Pulls(lambda: None, Fetching()).begin(name)


# --- with a hub ---


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = checkpoint(tmp_path / "served")
    safetensors(folder / "model.safetensors", 1 << 20)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    with running(folder) as found:
        use(monkeypatch, found.url)
        yield found


MAIN = ModelCard("main", 0, 8, details={"source": "owner/main"})
OTHER = ModelCard("model", 0, 8, state="ready", details={"source": "owner/model"})


class Shelf(FakeService):
    """Two models; keeps what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: tuple[ModelCard, ...] = (MAIN, OTHER)
        self.done: list[Any] = []

    def cards(self) -> tuple[ModelCard, ...]:
        return self.shown

    def unload(self, name: str) -> ModelCard:
        self.done.append(name)
        return OTHER

    def pin(self, name: str, pinned: bool) -> ModelCard:
        self.done.append((name, pinned))
        return OTHER


def fetched(hub: Hub) -> Pulls:
    pulls = Pulls(lambda: None)
    pulls.begin("owner/model")
    state = ended(pulls)
    assert (state["state"], state["bytes"]) == ("done", sum(path.stat().st_size for path in hub.folder.iterdir()))
    return pulls


def test_a_model_is_fetched_unloaded_and_removed_by_any_of_its_names(hub: Hub, tmp_path: Path) -> None:
    shelf = Shelf()
    library = Library(shelf, fetched(hub))
    place = tmp_path / "hub" / "models--owner--model"
    assert (place / "blobs").is_dir()
    name, size = library.remove("model")
    assert (name, shelf.done) == ("owner/model", ["model"]) and size > 1 << 20 and not place.exists()
    with pytest.raises(Conflict, match="is none of the models that were fetched"):
        library.remove("model")
    shelf.shown = (MAIN,)
    with pytest.raises(NotFound, match="owner/model is none of the models"):
        library.remove("owner/model")


def test_a_model_that_must_stay_stays_and_says_why(hub: Hub, tmp_path: Path) -> None:
    shelf = Shelf()
    library = Library(shelf, fetched(hub))
    with pytest.raises(Conflict, match="that this server was started with"):
        library.remove("main")
    with pytest.raises(Conflict, match="is a folder of yours"):
        library.remove(str(tmp_path))
    adapted = replace(OTHER, id="model+a", details={"source": "owner/model", "adapter": "a"})
    shelf.shown = (MAIN, adapted)
    with pytest.raises(NotFound):  # nobody means the base by an adapter's name
        library.remove("model+a")
    assert (tmp_path / "hub" / "models--owner--model").is_dir() and shelf.done == []


def test_a_fetch_that_is_cancelled_can_be_removed(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [1000, 0, 0, 0, 0, 0]
    pulls = Pulls(lambda: None)
    pulls.begin("owner/model")
    assert ended(pulls)["state"] == "failed"
    assert Library(Shelf(), pulls).remove("owner/model")[1] >= 1000
    assert not (tmp_path / "hub" / "models--owner--model").exists()


# --- the model's own file ---


def test_values_are_kept_in_the_models_own_file_and_all_else_in_it_stays(hub: Hub) -> None:
    shelf = Shelf()
    library = Library(shelf, Pulls(lambda: None))
    FOLDER.mkdir()
    path = FOLDER / "model.toml"
    path.write_text('# mine\nfamily = "llama"\ncontext = 4096 # enough\n\n[template]\nmany_calls = false\n')
    own = library.change("model", {"context": 8192, "ttl": 60, "pinned": True, "sampling.top_p": 0.5})
    assert own == dict(read_overrides(FOLDER, "owner/model").values)
    assert own | {"family": 1} == {
        "family": 1, "context": 8192, "ttl": 60, "pinned": True, "sampling.top_p": 0.5, "template.many_calls": False
    }  # fmt: skip
    assert path.read_text().startswith("# mine\nfamily") and "context = 8192 # enough" in path.read_text()
    assert shelf.done == [("model", True)]
    assert library.change("owner/model", {"ttl": None, "sampling.top_p": None, "sampling.top_k": None}).keys() == {
        "family", "context", "pinned", "template.many_calls"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"contxt": 1}, "nearest one is 'context'"),
        ({"context": 5}, "context=5 must be"),
        ({"pinned": "yes"}, "true or false"),
        ({"ttl": -1}, "number of seconds"),
        ({"sampling.top_p": 7}, "sampling.top_p=7"),
        ({"family": "llama"}, "no key"),
        ({"thinking": [1]}, "neither a number"),
    ],
)
def test_a_wrong_value_changes_nothing(hub: Hub, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotSupported, match=sentence):
        write_overrides(FOLDER, "owner/model", {"ttl": 5} | changes)
    assert not FOLDER.exists()


def test_a_table_in_one_line_is_changed_too(hub: Hub) -> None:
    FOLDER.mkdir()
    path = FOLDER / "owner--model.toml"
    path.write_text("sampling = {top_p = 0.5} # mine\n")
    assert write_overrides(FOLDER, "owner/model", {"sampling.top_k": 7}).values["sampling.top_k"] == 7
    assert path.read_text() == "sampling = {top_p = 0.5,top_k = 7} # mine\n"
    with pytest.raises(NotFound):
        Library(Shelf(), Pulls(lambda: None)).change("nobody", {"ttl": 1})


# --- names and places that are none ---


@pytest.mark.parametrize("name", ["", ".", "..", "/", "~", "/etc", "../x", "x" * 300, "ä" * 200, "owner/" + "x" * 300])
def test_what_is_no_models_name_is_neither_changed_nor_removed(hub: Hub, name: str) -> None:
    library = Library(Shelf(), Pulls(lambda: None))
    with pytest.raises(NotFound, match="is no model"):
        library.change(name, {"ttl": 5})
    with pytest.raises(Conflict if is_path(name) else NotFound):
        library.remove(name)
    assert not FOLDER.exists()


def test_a_disk_that_does_not_do_it_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied", "place")

    library = Library(Shelf(), fetched(hub))
    monkeypatch.setattr(shutil, "rmtree", fails)
    monkeypatch.setattr(overrides, "write_atomic", fails)
    with pytest.raises(Conflict, match=r"owner/model cannot be removed: .*Permission denied"):
        library.remove("owner/model")
    with pytest.raises(NotSupported, match=r"model\.toml cannot be written: .*Permission denied"):
        library.change("owner/model", {"ttl": 5})
