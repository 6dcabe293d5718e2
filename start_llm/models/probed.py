"""What was found out about models, kept in one SQLite file: found once, read at every later start.

A row for each fingerprint: the checkpoint's files, the libraries that render and load it, and this program's way of
finding out. A damaged file or row is set aside, and the model is asked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from start_llm.files.database import CacheDatabase, Damaged, FileUnavailable
from start_llm.models.capabilities import Signs
from start_llm.models.trial import Trial
from start_llm.prompt.probe import Traits

log = logging.getLogger(__name__)

FILE = "models.sqlite3"
PROBE_VERSION = 1
"""Raise it when finding out changes: every model is then asked again."""
_LIBRARIES = ("mlx-lm", "mlx-vlm", "transformers", "tokenizers", "jinja2")
_SCHEMA = """
CREATE TABLE models (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, at REAL NOT NULL, record TEXT NOT NULL, sum TEXT NOT NULL)
"""
_SCHEMA_VERSION = 1
_MOST_ROWS = 200
_SETS = {"starts", "structure"}
_LISTS = {"switches", "dates"}


@dataclass(frozen=True, slots=True)
class Probed:
    """
    Attributes:
        family: the name of the one that was detected.
        signs: what vocabulary and template show of how the model writes.
        traits: what the template does.
        trial: what the model did when it was asked to call a tool.
    """

    family: str
    signs: Signs
    traits: Traits
    trial: Trial


def probe_key(files: str) -> str:
    """The row of a checkpoint. `files`: `fingerprint.fingerprint` of its folder."""
    digest = hashlib.sha256(f"{PROBE_VERSION} {files}".encode())
    for library in _LIBRARIES:
        digest.update(f" {library} {_version(library)}".encode())
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "-"


class ProbeTable:
    """The file. Any thread; what cannot be read or written now is as if it were not there."""

    def __init__(self, path: Path) -> None:
        self._database = CacheDatabase(path, _SCHEMA, _SCHEMA_VERSION, what="what models can do")

    def get(self, key: str) -> Probed | None:
        def read(connection: sqlite3.Connection) -> Probed | None:
            row = connection.execute("SELECT record, sum FROM models WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            record, told = row
            if not isinstance(record, str) or _sum(key, record) != told:
                raise Damaged("a row is not what was written")
            return decode(record)

        try:
            return self._database.run(read)
        except FileUnavailable:
            return None

    def put(self, key: str, name: str, probed: Probed) -> None:
        record = encode(probed)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO models (key, name, at, record, sum) VALUES (?, ?, ?, ?, ?)",
                (key, name, time.time(), record, _sum(key, record)),
            )
            connection.execute(
                "DELETE FROM models WHERE key NOT IN (SELECT key FROM models ORDER BY at DESC LIMIT ?)", (_MOST_ROWS,)
            )

        with suppress(FileUnavailable):  # said once by the file itself
            self._database.run(write)

    def close(self) -> None:
        self._database.close()


def encode(probed: Probed) -> str:
    data = asdict(probed)
    data["traits"] = {name: sorted(v) if name in _SETS else v for name, v in data["traits"].items()}
    return json.dumps(data, ensure_ascii=False, sort_keys=True)


def decode(record: str) -> Probed:
    """Raises Damaged."""
    try:
        data: dict[str, Any] = json.loads(record)
        traits: dict[str, Any] = data["traits"]
        traits |= {name: frozenset(traits[name]) for name in _SETS} | {name: tuple(traits[name]) for name in _LISTS}
        data["traits"] = Traits(**traits)
        data["trial"] = Trial(**data["trial"])
        signs: dict[str, Any] = data["signs"]
        data["signs"] = Signs(**signs | {"think_tags": signs["think_tags"] and tuple(signs["think_tags"])})
        return Probed(**data)
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged("a row cannot be read") from error


def _sum(key: str, record: str) -> str:
    return hashlib.sha256(f"{key} {record}".encode()).hexdigest()
