"""The model that the server was started with goes and comes back as all others do."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from start_llm.engine import assembly
from tests.integration.live import live
from tests.integration.pooled import admin, ask, link_oracles, states

pytestmark = pytest.mark.thorough

REPOSITORY, COMMIT = "org/oracle-main", "0123456789abcdef"


@pytest.fixture
def hub(tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Hugging Face with one model in it. Gives that model's folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--oracle-main"
    put(folder, COMMIT, folders["plain"])
    return folder


def put(folder: Path, commit: str, files: Path) -> None:
    shutil.copytree(files, folder / "snapshots" / commit)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit, "utf-8")


def begin(hub: Path, folders: dict[str, Path], cache: Path, **settings: Any) -> Any:
    link_oracles(folders, cache)
    return live(Path(REPOSITORY), cache, **settings)


def test_a_main_model_that_was_removed_meanwhile_is_not_fetched_again(
    hub: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr("start_llm.models.pull.pull", lambda source, *_, **__: fetched.append(source))
    with begin(hub, folders, tmp_path, max_loaded_models=1) as server:
        assert ask(server, "oracle-hybrid").status_code == 200
        shutil.rmtree(hub)
        refused = ask(server)
        assert refused.status_code == 404 and "org/oracle-main is not on this disk any more" in refused.text
        assert states(server)["oracle-main"] == "failed" and states(server)["oracle-hybrid"] == "ready"
        assert ask(server, "oracle-hybrid").status_code == 200 and not fetched


def test_a_main_model_that_was_fetched_anew_comes_back_as_it_is_now(
    hub: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    with begin(hub, folders, tmp_path, max_loaded_models=1) as server:
        assert ask(server, "oracle-hybrid").status_code == 200
        shutil.rmtree(hub)
        put(hub, "fedcba9876543210", folders["windowed"])
        assert ask(server).json()["model"] == "oracle-main"
        assert sorted(states(server)) == ["oracle-hybrid", "oracle-main", "oracle-windowed"], "it is there once"


def test_it_comes_back_without_the_model_thread_reading_what_needs_no_mlx(
    hub: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others decode meanwhile: reading a tokenizer would hold them up."""
    readers: list[str] = []

    def noted(read: Any) -> Any:
        def reading(*args: Any, **more: Any) -> Any:
            readers.append(threading.current_thread().name)
            return read(*args, **more)

        return reading

    with begin(hub, folders, tmp_path) as server:
        assert admin(server, "unload", model="default").status_code == 200
        monkeypatch.setattr(assembly, "read_tokenizer", noted(assembly.read_tokenizer))
        assert ask(server).status_code == 200
        assert not readers, "the last ones are kept"
        assert admin(server, "unload", model="default").status_code == 200
        for file in hub.rglob("tokenizer.json"):
            file.write_text(file.read_text() + "\n")
        assert ask(server).status_code == 200
        assert set(readers) == {"loader"}


@pytest.mark.parametrize("name", ["default", REPOSITORY, "oracle-main"])
def test_it_is_pinned_by_each_of_its_names(hub: Path, folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    with begin(hub, folders, tmp_path, max_loaded_models=1, pinned_models=name, pool_wait_seconds=1) as server:
        assert ask(server, "oracle-hybrid").status_code == 507
        assert states(server)["oracle-main"] == "ready"
