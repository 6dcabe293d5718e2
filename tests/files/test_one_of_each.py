"""One `Lru`, one `write_atomic`, one `FileLock`: all in `files/`. Nobody writes another one by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import start_llm

PACKAGE = Path(start_llm.__file__).parent
MAY = {
    ("host/blas.py", "write_atomic"),  # what a compiler wrote; the installer uses this module, too
    ("models/pull.py", "write_atomic"),  # a download of gigabytes goes on in its file, and is renamed when it is whole
}


def _by_hand(source: str) -> set[str]:
    """What of `files/` this source does by itself."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        if name == "flock" or (owner == "fcntl" and name == "lockf"):
            found.add("FileLock")
        if (name == "popitem" and (node.args or node.keywords)) or name == "move_to_end":
            found.add("Lru")
        if (owner == "os" and name in {"replace", "rename"}) or (name == "replace" and len(node.args) == 1):
            found.add("write_atomic")
    return found


def test_the_check_finds_one() -> None:
    assert _by_hand("fcntl.flock(file, fcntl.LOCK_EX)") == {"FileLock"}
    assert _by_hand("known.popitem(last=False)") == _by_hand("known.move_to_end(key)") == {"Lru"}
    assert _by_hand("os.replace(fresh, path)") == _by_hand("fresh.replace(path)") == {"write_atomic"}
    assert _by_hand("text.replace('a', 'b'); replace(record, name='x'); known.popitem(); day.replace(hour=0)") == set()


def test_nobody_writes_one_by_hand() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("files/"):
            found |= {(name, what) for what in _by_hand(path.read_text("utf-8"))}
    tree = ("prompt/tree.py", "Lru")  # who goes on from a node uses all before it: an order of its own
    assert found - MAY - {tree} == set()
