"""The Homebrew formula: its text says what is installed, exactly what was tested. There is no `brew` here to try it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.brew_formula import MAC, ROOT, formula, pins

CONSTRAINTS = (ROOT / "constraints.txt").read_text("utf-8")


@pytest.fixture
def text(tmp_path: Path) -> str:
    archive = tmp_path / "start_llm-0.2.0.tar.gz"
    archive.write_bytes(b"an archive")
    return formula(archive, "https://example.org/start_llm/releases/start_llm-0.2.0.tar.gz")


def test_its_text_is_whole(text: str, tmp_path: Path) -> None:
    assert not re.search(r"@[A-Z0-9]+@", text) and text.startswith("#")
    assert f'sha256 "{hashlib.sha256(b"an archive").hexdigest()}"' in text
    assert 'depends_on "python@3.12"' in text and 'license "Apache-2.0"' in text
    assert 'homepage "https://example.org/start_llm"' in text and 'desc "Local, KV' in text
    described = re.findall(r'desc "(.*)"', text)[0]
    assert len(described) <= 80 and not described.startswith(("A ", "An ")) and not described.endswith(".")
    assert max(map(len, text.splitlines())) <= 118
    if ruby := shutil.which("ruby"):
        file = tmp_path / "start-llm.rb"
        file.write_text(text)
        subprocess.run([ruby, "-c", file], check=True, capture_output=True, timeout=60)


def test_its_pins_are_those_of_the_constraints(text: str) -> None:
    listed = re.findall(r"^    ([\w.-]+==[\w.]+)$", text, re.MULTILINE)
    assert listed == pins(CONSTRAINTS) and len(listed) > 50
    assert all(re.search(rf"^{re.escape(pin)}(\s|$)", CONSTRAINTS, re.MULTILINE) for pin in listed)
    names = {pin.partition("==")[0] for pin in listed}
    assert {"mlx", "mlx-lm", "mlx-metal", "pydantic-core"} <= names
    assert not {"litellm", "mlx-vlm", "pytest", "mypy", "mkdocs", "scipy-openblas32", "mlx-cpu"} & names


def test_what_a_package_needs_is_there_too() -> None:
    """Held against what the installed packages say themselves; where their versions differ nothing can be said."""
    listed = dict(pin.split("==") for pin in pins(CONSTRAINTS))
    missing = []
    for name, pinned in listed.items():
        try:
            if version(name) != pinned:
                continue
        except PackageNotFoundError:
            continue
        for line in requires(name) or []:
            need = Requirement(line)
            environment = MAC | {"extra": "", "python_full_version": "3.12.0", "python_version": "3.12"}
            if need.marker is None or need.marker.evaluate(environment):
                needed = canonicalize_name(need.name)
                missing += [f"{name} needs {needed}"] if needed not in listed else []
    assert missing == []


def test_a_package_that_only_tests_need_is_left_out() -> None:
    lines = (
        "aa==1  # via -r requirements.txt\nbb==2  # via aa, cc\ncc==3  # via -r requirements-dev.txt\ndd==4  # via cc\n"
    )
    more = "ee==5 ; sys_platform == 'linux'  # via aa\nff==6 ; sys_platform == 'darwin'  # via bb\n"
    assert pins(lines + more) == ["aa==1", "bb==2", "ff==6"]
