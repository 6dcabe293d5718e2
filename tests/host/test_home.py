from __future__ import annotations

from pathlib import Path

import pytest

from start_llm.host import home as homes


def test_a_clone_is_its_own_home_and_an_installed_package_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("START_LLM_HOME", raising=False)
    assert (homes.home() / "install_and_run.py").is_file()
    monkeypatch.setattr(homes, "SOURCES", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert homes.home() == tmp_path / ".start_llm"
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "other"))
    assert homes.made_home() == tmp_path / "other" and (tmp_path / "other").stat().st_mode & 0o777 == 0o700
