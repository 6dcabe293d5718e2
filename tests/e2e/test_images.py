"""A picture in an agent's history, read by its own tool, on a model that reads text only: the session goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from start_llm.launch.clients import CLIENTS
from tests.e2e.install import search_path
from tests.e2e.scenarios import SCENARIOS, call
from tests.e2e.test_clients import check
from tests.e2e.world import World
from tests.images.pictures import png
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

READ: dict[str, Callable[[Path], str]] = {
    "pi": lambda path: call("read", path=str(path)),
    "claude": lambda path: call("Read", file_path=str(path)),
    "opencode": lambda path: call("read", filePath=str(path)),
    "codex": lambda path: call("view_image", path=str(path)),
    "qwen": lambda path: call("read_file", file_path=str(path)),
}
SENDS = frozenset({"claude"})
"""Agents that send a picture whatever they are told of the model; the others leave it out, or say so, themselves."""


@pytest.mark.parametrize("name", list(READ))
def test_a_picture_does_not_end_the_session(name: str, world: World) -> None:
    path = os.pathsep.join(str(folder) for folder in search_path(name))
    if shutil.which(CLIENTS[name].command, path=path) is None:
        pytest.skip(f"{CLIENTS[name].title} is not installed: python3.12 tests/e2e/install.py {name}")
    folder = world.folder / name / "pictures"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=folder, env=world.environment(name), check=True)
    (folder / "shot.png").write_bytes(png(200, 120))
    scenario = SCENARIOS[name]
    data = world.folder / name / "cache" / "launch" / name
    looks = [f"I look at it.\n{READ[name](folder / 'shot.png')}", "It cannot be shown to me."]
    first = world.launch(
        name, folder, *scenario.first(f"What is in shot.png? {script(*looks)}", data), seconds=scenario.seconds
    )
    check(first, len(looks))
    again = world.launch(
        name, folder, *scenario.again(f"And now? {script('Still nothing.')}", data), seconds=scenario.seconds
    )
    check(again, 1)
    if name in SENDS:
        assert "iVBORw0KGgo" in json.dumps([entry["body"] for entry in again.sent]), "the picture is in the history"
