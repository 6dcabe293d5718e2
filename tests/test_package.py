"""What is installed by ``uv tool install .`` or ``pip install .``."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from start_llm.core.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_command_is_there() -> None:
    module, _, function = PROJECT["project"]["scripts"]["start-llm"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_dependencies_are_the_pins_of_requirements() -> None:
    (name,) = PROJECT["tool"]["setuptools"]["dynamic"]["dependencies"].values()
    assert name == ["requirements.txt"]  # `test_install_and_run` looks at its pins


def test_an_extra_is_tested_in_the_version_that_it_installs() -> None:
    tested = (ROOT / "requirements-dev.txt").read_text("utf-8").splitlines()
    for pins in PROJECT["project"]["optional-dependencies"].values():
        assert pins
        assert set(pins) <= set(tested)
    known = {extra.name: list(extra.pins) for extra in EXTRAS.values()}
    assert known == PROJECT["project"]["optional-dependencies"]


@pytest.mark.smoke
def test_every_file_that_is_no_module_is_package_data() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["start_llm"]
    listed = subprocess.check_output(["git", "ls-files", "start_llm"], cwd=ROOT, text=True).splitlines()
    others = [path.removeprefix("start_llm/") for path in listed if not path.endswith(".py")]
    assert others
    assert [path for path in others if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)] == []


@pytest.mark.slow
def test_the_wheel_runs_from_anywhere(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if uv is None:
        pytest.skip("no uv")
    # The wheel is built from the source archive, so both are whole.
    subprocess.run([uv, "build", "--out-dir", tmp_path, ROOT], check=True, capture_output=True)
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"constraints.txt", "requirements.txt", "start_llm/py.typed"} <= names
    assert not any(name.startswith("tests/") for name in names)
    into = tmp_path / "site"
    install = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", into, wheel]
    subprocess.run(install, check=True, capture_output=True)
    assert (into / "start_llm" / "models" / "templates" / "smollm2.jinja").is_file()
    assert (into / "start_llm" / "py.typed").is_file()
    environment = {**os.environ, "PYTHONPATH": str(into), "HOME": str(tmp_path)}
    environment.pop("START_LLM_HOME", None)
    for words, said in ((["--version"], "start-llm 0."), (["serve", "/nothing"], "no such folder")):
        command = [sys.executable, str(into / "bin" / "start-llm"), *words]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert said in run.stdout + run.stderr
