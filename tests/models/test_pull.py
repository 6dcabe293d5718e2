from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from start_llm.cli.fetched import main_rm
from start_llm.core.settings import load_settings
from start_llm.models import pull as pulling
from start_llm.models.catalog import hub_folder, snapshot, stored_models, whole_snapshot
from start_llm.models.pull import Pulled, PullError, _reason, fetch_lock, pull
from tests.cli.places import checkpoint, safetensors
from tests.models.hub import COMMIT, Hub, digest, running, use

MIB = 1 << 20
SIZE = 2 * MIB


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = checkpoint(tmp_path / "served")
    safetensors(folder / "model.safetensors", SIZE)
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"not needed either")
    with running(folder) as served:
        use(monkeypatch, served.url)
        yield served


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where huggingface_hub and this server keep what they fetch."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetch(hub: Hub, cache: Path, **more: object) -> Pulled:
    steps: list[float] = []
    done = pull("owner/model", lambda _, part: steps.append(part), **more)  # type: ignore[arg-type]
    assert steps == sorted(steps)
    return done


def test_a_repositorys_name_is_what_the_hub_takes() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        name = "".join(draw.choices(["a", "9", "-", ".", "_", "/", ".git", "é", "b" * 93], k=draw.randint(1, 9)))
        try:
            validate_repo_id(name)
        except HFValidationError:
            with pytest.raises(ValueError, match="no repository's name"):
                hub_folder(name)
        else:
            assert hub_folder(name).name == repo_folder_name(repo_id=name, repo_type="model")


def test_what_is_needed_is_fetched_and_verified(hub: Hub, cache: Path) -> None:
    done = fetch(hub, cache)
    assert {path.name for path in done.folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert digest(done.folder / "model.safetensors") == digest(hub.folder / "model.safetensors")
    assert done.commit == COMMIT and done.fetched == hub.sent > SIZE
    assert snapshot("owner/model") == done.folder
    (model,) = stored_models(cache)
    assert model.name == "owner/model" and model.problem == "" and model.size > SIZE
    assert fetch(hub, cache).fetched == 0 and hub.sent == done.fetched, "a second time nothing large is fetched"


def test_what_breaks_off_goes_on_within_one_try(hub: Hub, cache: Path) -> None:
    hub.cuts = [MIB // 2, MIB // 2, 10]
    done = fetch(hub, cache)
    assert hub.asked == [0, MIB // 2, MIB, MIB + 10]
    assert digest(done.folder / "model.safetensors") == digest(hub.folder / "model.safetensors")
    assert done.fetched == hub.sent == (hub.folder / "model.safetensors").stat().st_size


def test_a_hub_that_sends_nothing_is_given_up_and_the_next_try_goes_on(hub: Hub, cache: Path) -> None:
    hub.cuts, told = [MIB, *[0] * pulling.TRIES], list[float]()
    with pytest.raises(PullError, match=r"model\.safetensors was broken off with .* goes on from there"):
        pull("owner/model", lambda _, part: told.append(part))
    assert max(told) > 0 and told[-1] < 0, "its bar on a terminal goes"
    assert whole_snapshot("owner/model") is None
    fetch(hub, cache)
    assert hub.asked[-1] == MIB


def test_a_wrong_hash_is_one_sentence_and_is_not_kept(hub: Hub, cache: Path) -> None:
    hub.damaged = True
    with pytest.raises(PullError, match="is not what the hub says it is") as refused:
        fetch(hub, cache)
    assert str(refused.value).count("\n") == 0
    assert list((hub_folder("owner/model") / "blobs").glob("*.part")) == []
    hub.damaged = False
    assert fetch(hub, cache).fetched > SIZE


def test_a_disk_that_is_too_small_is_told_before_anything_large_is_fetched(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10, 9, 1 * MIB)
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(PullError, match="make room"):
        fetch(hub, cache)
    assert hub.sent == 0


def test_all_files_are_of_one_commit_and_main_points_there(hub: Hub, cache: Path) -> None:
    first = fetch(hub, cache)
    hub.commit = "f" * 40
    second = fetch(hub, cache)
    assert first.folder != second.folder and snapshot("owner/model") == second.folder
    assert second.fetched == 0  # the same weights


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("owner/nothing", None, "no model owner/nothing"),
        ("owner/model", "v9", "no revision 'v9'"),
        ("a/b/c", None, "no repository's name"),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, cache: Path, name: str, revision: str | None, said: str) -> None:
    with pytest.raises(PullError, match=said):
        pull(name, lambda *_: None, revision=revision)


def test_what_mlx_cannot_serve_is_not_fetched(hub: Hub, cache: Path) -> None:
    (hub.folder / "model.safetensors").rename(hub.folder / "model.gguf")
    with pytest.raises(PullError, match=r"GGUF files for llama\.cpp"):
        fetch(hub, cache)


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "/etc", "-x", "a b", "a\nb"])
def test_a_revision_that_leads_elsewhere_is_none(hub: Hub, cache: Path, revision: str) -> None:
    with pytest.raises(PullError, match="no branch, tag or commit"):
        fetch(hub, cache, revision=revision)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rfilename", "../../evil.json"),
        ("rfilename", "/tmp/evil.json"),
        ("rfilename", "a//evil.json"),
        ("rfilename", "..\\evil.json"),
        ("lfs", {"sha256": "../../evil", "size": 1, "pointerSize": 134}),
        ("sha", "../../evil"),
    ],
)
def test_a_hub_that_lies_writes_nowhere(
    field: str, value: Any, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = hub.listing()
    if field == "sha":
        listing["sha"] = value
    else:
        listing["siblings"].append({"rfilename": "extra.json", "size": 1, "blobId": "0" * 40} | {field: value})
    monkeypatch.setattr(hub, "listing", lambda: listing)
    with pytest.raises(PullError, match="no hub should; nothing was fetched"):
        fetch(hub, cache)
    assert not any(path.is_file() for path in cache.rglob("*") if not path.name.endswith(".lock"))


def test_what_is_being_fetched_is_not_removed_and_a_link_is_not_followed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    fetch(hub, cache)
    settings = load_settings(None, start_llm_cache_dir=tmp_path)
    remove = argparse.Namespace(name="owner/model")
    folder = cache / "models--owner--model"
    lock = fetch_lock(folder)
    assert lock.take()
    with pytest.raises(PullError, match="being fetched"):
        main_rm(settings, remove)
    lock.drop()
    folder.rename(tmp_path / "disk")
    folder.symlink_to(tmp_path / "disk")
    with pytest.raises(PullError, match="is a link"):
        main_rm(settings, remove)
    assert list((tmp_path / "disk").rglob("*.safetensors"))
    for name in ("../x", "a/../../b", str(tmp_path), "..", ""):
        with pytest.raises(PullError):
            main_rm(settings, argparse.Namespace(name=name))
    assert (tmp_path / "disk").exists()


def test_what_a_hub_says_is_no_order_to_a_terminal() -> None:
    assert _reason(OSError("busy \x1b[2J\x9b1m\n  <b>日本</b>")) == "busy ?[2J?1m <b>日本</b>"


def test_no_hub_in_reach_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(HfApi, "model_info", None)  # it would try again for half a minute
    with pytest.raises(PullError, match="Hugging Face cannot be reached") as refused:
        pull("owner/model", lambda *_: None)
    assert "`start-llm models` lists what can be served" in str(refused.value) and str(refused.value).count("\n") == 0


def start_llm(hub: Hub, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0"}
    environment |= {"START_LLM_HOME": str(folder), "START_LLM_CACHE_DIR": str(folder / "cache")}
    for name in ("MODEL_PATH", "HF_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "start_llm", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.live
def test_the_commands(hub: Hub, tmp_path: Path) -> None:
    pulled = start_llm(hub, tmp_path, "pull", "owner/model")
    assert pulled.returncode == 0, pulled.stderr
    assert "owner/model at 0123456789ab" in pulled.stdout and "fetched" in pulled.stdout
    listed = start_llm(hub, tmp_path, "models")
    assert "owner/model" in listed.stdout
    assert start_llm(hub, tmp_path, "rm", "owner/model").returncode == 0
    again = start_llm(hub, tmp_path, "rm", "owner/model")
    assert again.returncode == 1 and "none of the models that were fetched" in again.stderr


@pytest.mark.slow
def test_200_mb_broken_off_three_times(hub: Hub, tmp_path: Path) -> None:
    """Each try is a process of its own that is killed on its way."""
    safetensors(hub.folder / "model.safetensors", 200 * MIB)
    size = (hub.folder / "model.safetensors").stat().st_size
    for _ in range(3):
        hub.cuts = [60 * MIB, *[0] * pulling.TRIES]
        broken = start_llm(hub, tmp_path, "pull", "owner/model")
        assert broken.returncode == 1 and "goes on from there" in broken.stderr
    hub.cuts = []
    done = start_llm(hub, tmp_path, "pull", "owner/model")
    assert done.returncode == 0, done.stderr
    assert hub.sent == size
