from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from start_llm.files.atomic import UNFINISHED, remove_anything, write_atomic


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("named", [Path, str, os.path.basename])
def test_a_file_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Callable[[Path], str | Path], sync: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "state.json"
    given = named(path)
    write_atomic(given, "Grüße", sync=sync)
    assert path.read_text("utf-8") == "Grüße" and path.stat().st_mode & 0o777 == 0o600
    with path.open("rb") as reader:
        write_atomic(given, b"\x00new", sync=sync, mode=0o644)
        assert reader.read().decode() == "Grüße"  # who reads has one or the other
    assert path.read_bytes() == b"\x00new" and path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "state").symlink_to(tmp_path / "mine")
    write_atomic(tmp_path / "state", "new")
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "state").is_symlink()


@pytest.mark.parametrize("kind", [Path, str])
def test_anything_is_removed_but_what_a_link_leads_to(tmp_path: Path, kind: type[Path] | type[str]) -> None:
    (folder := tmp_path / "folder").mkdir()
    (folder / "file").write_text("mine")
    (link := tmp_path / "link").symlink_to(folder)
    (broken := tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for path in (link, broken, tmp_path / "nothing"):
        remove_anything(kind(path))
    assert list(tmp_path.iterdir()) == [folder] and (folder / "file").exists()
    remove_anything(kind(folder))
    assert not folder.exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, "new", sync=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_a_kill_leaves_is_known_by_its_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "state", object())  # type: ignore[arg-type]
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".state.") and left.name.endswith(UNFINISHED)
