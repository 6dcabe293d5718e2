"""Keeps what was found out about checkpoints, a file for each. Knows no MLX, and finds nothing out; any thread.

A file's name stands for the checkpoint's files, the libraries that load and render it, and the version of this way of
finding out. What cannot be read is found out again.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter

from start_llm.files.atomic import write_atomic
from start_llm.models.capabilities import ProbeResult

PROBES = "probes"
"""The folder of these files in START_LLM_CACHE_DIR."""
PROBE_VERSION = 5
"""Raise it when finding out changes: every model is then probed again."""
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers", "jinja2")
_MOST_FILES = 400
_RECORD = TypeAdapter(ProbeResult)

log = logging.getLogger(__name__)


def probe_key(files: str) -> str:
    """The name of a checkpoint's file. `files`: `fingerprint.fingerprint` of its folder."""
    digest = hashlib.sha256(f"{PROBE_VERSION} {files}".encode())
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f" {library} {version(library)}".encode())
    return digest.hexdigest()


def read_probe(folder: Path, key: str) -> ProbeResult | None:
    """What an earlier load found out. ``None``: nothing, or the file cannot be read."""
    try:
        return decode((folder / f"{key}.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("what a model can do is found out again, %s/%s.json cannot be read: %s", folder, key, error)
        return None


def keep_probe(folder: Path, key: str, result: ProbeResult) -> None:
    """Where it cannot be written, that is logged."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(folder / f"{key}.json", encode(result))
        with suppress(FileNotFoundError):  # another server removes them, too
            for old in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST_FILES]:
                old.unlink()
    except OSError as error:
        log.warning("what a model can do cannot be kept in %s: %s", folder, error)


def encode(result: ProbeResult) -> str:
    return _RECORD.dump_json(result).decode()


def decode(record: str) -> ProbeResult:
    """Raises ValueError."""
    return _RECORD.validate_json(record)
