"""A folder of files that were made once: its list with sizes and checksums, by which damage is found later."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from start_llm.files.atomic import write_atomic

NAME = "MANIFEST"  # without an ending: it is none of the folder's data files


def seal(folder: Path, *, leave_out: frozenset[str] = frozenset()) -> None:
    """Writes the list of all files in `folder`, but for `leave_out`. Raises OSError."""
    entries = {
        path.name: {"sha256": _sha256(path), **_stamp(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != NAME and path.name not in leave_out
    }
    write_atomic(folder / NAME, json.dumps(entries, indent=1), mode=0o666)


def is_sealed(folder: Path) -> bool:
    return (folder / NAME).is_file()


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, ``None`` if nothing is.

    A file is read only if its time of change is not the one that was written down.
    """
    try:
        entries: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        moved = False
        for name, entry in entries.items():
            path = folder / name
            if path.parent != folder or not path.is_file():
                return f"{name} is missing"
            stamp = _stamp(path)
            if stamp["bytes"] != entry["bytes"]:
                return f"{name} has {stamp['bytes']} bytes, not {entry['bytes']}"
            if stamp["changed"] != entry["changed"]:
                if _sha256(path) != entry["sha256"]:
                    return f"{name} has another checksum"
                entry["changed"] = stamp["changed"]
                moved = True
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its list of files cannot be read: {error}"
    if moved:  # it was copied: the next start need not read it again
        with suppress(OSError):
            write_atomic(folder / NAME, json.dumps(entries, indent=1), mode=0o666)
    return None


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"bytes": found.st_size, "changed": found.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
