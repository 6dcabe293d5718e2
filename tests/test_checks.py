"""The checks beside pytest find what is planted: one that cannot fail proves nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.live

PLANTED = """
import os

_count = 0
def f():
    global _count
    import sys
    try:
        _count = sys.maxsize
    except Exception:
        pass
"""
BROKEN = {
    "rooms in the order": ("core/errors.py", "import start_llm.chat.service"),
    "HTTP knows no model API": ("api/http/wire.py", "import start_llm.api.openai.chat"),
    "MLX is touched": ("chat/service.py", "import mlx.core"),
    "LiteLLM is imported": ("proxy/keeper.py", "import litellm"),
    "the server never imports": ("proxy/launcher.py", "import start_llm.proxy.application"),
    "LiteLLM's process stays light": ("core/hosts.py", "import transformers"),
}
"""By contract: where an import breaks it."""


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False, timeout=250
    )


def test_ruff_finds_what_the_rules_of_the_code_forbid(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    found = run(sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", file)
    assert found.returncode == 1
    assert {"F401", "PLW0603", "PLC0415", "BLE001"} <= set(re.findall(r"\b[A-Z]+\d{3,4}\b", found.stdout))
    assert run(sys.executable, "-m", "ruff", "format", "--check", file).returncode == 1


def test_mypy_finds_what_is_not_typed_and_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text("def f(x):\n    return x\n\n\ny: int = 'a'\n")
    found = run(sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path, file)
    assert found.returncode == 1 and {"[no-untyped-def]", "[assignment]"} <= set(
        re.findall(r"\[[\w-]+\]", found.stdout)
    )


@pytest.mark.thorough
def test_each_contract_of_imports_can_be_broken(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "start_llm", tmp_path / "start_llm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, planted in BROKEN.values():
        with (tmp_path / "start_llm" / path).open("a") as file:
            file.write(f"\n{planted}\n")
    found = run(Path(sys.executable).with_name("lint-imports"), "--no-cache", cwd=tmp_path)
    states = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in _plain(found.stdout).splitlines()}
    contracts = {name: state for name, state in states.items() if state in {"KEPT", "BROKEN"}}
    assert found.returncode != 0 and len(contracts) == len(BROKEN), "a new contract needs a line in BROKEN"
    assert {name for name in contracts if contracts[name] == "KEPT"} == set()


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)
