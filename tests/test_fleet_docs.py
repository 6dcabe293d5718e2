"""Every command in `docs/fleet.md` is one that can be typed, and every variable is a setting."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from start_llm.cli.reading import read
from start_llm.core.settings import Settings, load_settings
from start_llm.proxy.fleet import NODE_HEADER

TEXT = (Path(__file__).parents[1] / "docs" / "fleet.md").read_text("utf-8")
LINES = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("start-llm ")])
def test_a_command_is_read_as_it_is_written(line: str) -> None:
    assert read(shlex.split(line)[1:]).command.name == line.split()[1]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("export ")])
def test_a_variable_is_a_setting(line: str) -> None:
    name, _, value = shlex.split(line)[1].partition("=")
    assert name.lower() in Settings.model_fields
    load_settings(None, **{name.lower(): value})


def test_nothing_else_is_typed() -> None:
    others = [line for line in LINES if not line.startswith(("start-llm ", "export ", "pip install ", "smg launch "))]
    assert all(line.startswith("curl ") and f"| grep {NODE_HEADER}" in line for line in others), others
