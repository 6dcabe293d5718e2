"""How the package is laid out: rooms only, and no name twice."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

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
