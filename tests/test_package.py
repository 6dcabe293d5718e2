"""What is installed by ``uv tool install .`` or ``pip install .``, the image for Linux, and the server as a library."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from start_llm.core.extras import EXTRAS
from start_llm.core.settings import Settings
from tests.oracle import build_oracle

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


OTHERS = {"HF_HOME"}  # read by libraries


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction with its arguments, as Docker reads the file: without comments, lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(first, rest.strip()) for first, _, rest in (line.partition(" ") for line in joined.splitlines()) if first]


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile of this project."""
    steps = instructions(text)
    found = []
    version = (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].partition(",")[0].strip(">=")
    )
    if not steps[0][1].startswith(f"python:{version}-"):
        found.append("another Python")
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for source in (name for step, words in steps if step == "COPY" for name in words.split()[:-1]):
        if not (ROOT / source).exists() or f"!{source}" not in sent:
            found.append(f"COPY {source}")
    if not any(
        step == "RUN" and 'pip install --no-cache-dir ".[vision]" -c constraints.txt' in words for step, words in steps
    ):
        found.append("no pinned install")
    users = [words for step, words in steps if step == "USER"]
    if users[-1:] in ([], ["root"]):
        found.append("runs as root")
    names = re.findall(r"(\w+)=", " ".join(words for step, words in steps if step == "ENV"))
    found += [f"ENV {name}" for name in names if name not in OTHERS and name.lower() not in Settings.model_fields]
    return found


def test_the_dockerfile_is_sound() -> None:
    assert faults((ROOT / "Dockerfile").read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("FROM python:3.12", "FROM python:3.13", "another Python"),
        ("COPY start_llm", "COPY start_lm", "COPY start_lm"),
        ('".[vision]" -c constraints.txt', ".", "no pinned install"),
        ("USER llm", "USER root", "runs as root"),
        ("LOG_ROOT=", "LOG_ROOTS=", "ENV LOG_ROOTS"),
    ],
)
def test_a_planted_fault_is_found(old: str, new: str, fault: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    assert fault in faults(text.replace(old, new))


@pytest.mark.slow
def test_the_image_is_built() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("no Docker that builds")
    subprocess.run([docker, "build", "--tag", "start-llm-test", ROOT], check=True, timeout=1800)
    command = [docker, "run", "--rm", "start-llm-test", "--version"]
    assert "start_llm" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text("utf-8")


@pytest.mark.live
def test_a_process_that_may_open_few_files_serves() -> None:
    """mlx-lm's import asks for 4,096, which only those who may raise limits (root on Linux) get."""
    code = (
        "import ctypes, os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "if sys.platform == 'linux':\n"
        "    ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: for what is executed next\n"
        "what = 'import start_llm.models.loader, resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))'\n"
        "os.execv(sys.executable, [sys.executable, '-c', what])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("(256, 256)\n", 0), done.stderr


@pytest.mark.live
def test_the_example_runs_and_prints_nothing_else(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    environment = {
        **os.environ,
        "MODEL_PATH": str(build_oracle(tmp_path / "oracle", "plain")),
        "TRUST_REMOTE_CODE": "true",
        "START_LLM_CACHE_DIR": str(tmp_path / "cache"),
        "LOG_ROOT": str(tmp_path / "logs"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    run = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
    # transformers has words of its own for a kind of model that it does not know, as the oracle is one.
    assert [line for line in run.stderr.splitlines() if not line.startswith("[transformers]")] == []
    first, second, third = run.stdout.splitlines()
    assert first.startswith("Answer ") and second.startswith("Answer ")
    reused, prompt = map(int, re.findall(r"\d+", third))
    assert 0 < reused < prompt
