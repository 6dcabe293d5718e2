"""How the package is laid out: rooms only, and no name twice."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "start_llm"


def public_classes(package: Path) -> dict[str, list[str]]:
    """The files of each public class at the top of a module, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(package)))
    return dict(found)


def loose_modules(package: Path) -> set[str]:
    return {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py", "app.py"}


def test_no_public_class_name_stands_twice() -> None:
    classes = public_classes(PACKAGE)
    assert len(classes) > 100
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}


def test_no_module_lies_loose() -> None:
    assert loose_modules(PACKAGE) == set()


def test_both_are_found_where_they_are_planted(tmp_path: Path) -> None:
    for name in ("app.py", "loose.py", "room/one.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("class Twice: ...\nclass _Private: ...\n", "utf-8")
    assert loose_modules(tmp_path) == {"loose.py"}
    assert public_classes(tmp_path) == {"Twice": ["app.py", "loose.py", "room/one.py"]}


def test_layers_are_rooms() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = contracts[0]["layers"]
    rooms = {name.strip() for layer in layers for name in layer.split("|")}
    folders = {f"start_llm.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert len(layers) <= 14
    assert rooms == folders | {"start_llm.__main__", "start_llm.app"}


def missing_files(page: str) -> set[str]:
    """Modules and folders of the package that a page names in backticks, and that there are none of.

    In the table of rooms a name stands for a file of its row's rooms. Elsewhere a name with a room in front counts.
    """
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    missing = set()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        own = [name.strip("/") for name in re.findall(r"`([^`]+)`", cells[1])] if len(cells) == 3 else []
        if own and all(name in rooms for name in own):
            for name in re.findall(r"`([a-z_/]+)`", cells[2]):
                if not any(_is_there(place) for place in (name, *(f"{room}/{name}" for room in own))):
                    missing.add(f"{own[0]}/{name}")
        else:
            paths = re.findall(r"`(?:start_llm/)?([a-z_/]+/[a-z_]+)(?:\.py)?(?:::\w+)?`", line)
            missing |= {name for name in paths if name.split("/")[0] in rooms and not _is_there(name)}
    return missing


def _is_there(name: str) -> bool:
    """Whether it is a folder or module of the package, or a file of its tests."""
    paths = [PACKAGE / name.strip("/"), ROOT / "tests" / name]
    return paths[0].is_dir() or any(path.with_suffix(".py").is_file() for path in paths)


@pytest.mark.parametrize(
    "path", [ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_pages_name_files_that_there_are(path: Path) -> None:
    assert missing_files(path.read_text("utf-8")) == set()


def test_a_file_that_is_none_is_found() -> None:
    table = "| what | `kvcache/`, `files/` | `store`, `lru`, `nothing`, `models/room` |"
    page = f"{table}\nsee `engine/decode/none.py`, `engine/loop`"
    assert missing_files(page) == {"kvcache/nothing", "engine/decode/none"}
