"""The image for Linux: its text is checked everywhere, and it is built where Docker can build it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from start_llm.core.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
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
