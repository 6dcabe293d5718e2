"""Finds out what a model can do when it is loaded for the first time, and keeps that in one SQLite file.

Model thread; only the model's own answers are computed there, all else in the background. A row stands for a
checkpoint's files, the libraries that load and render it, and the version of this way of finding out. A damaged file
or row is dropped, and the model is probed again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from start_llm.core.settings import Settings
from start_llm.files.database import CacheDatabase, Damaged, FileUnavailable
from start_llm.models.background import in_background
from start_llm.models.capabilities import ProbeResult, WritingHints
from start_llm.models.loader import LoadedModel
from start_llm.models.overrides import LEAST_CONTEXT
from start_llm.models.tool_probe import ExpectedStyle, Generate, ToolCallProbe, probe_tool_calls
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.ports import TemplateError
from start_llm.prompt.probe import Traits, probe

FILE = "models.sqlite3"
PROBE_VERSION = 1
"""Raise it when finding out changes: every model is then probed again."""
_LIBRARIES = ("mlx-lm", "mlx-vlm", "transformers", "tokenizers", "jinja2")
_SCHEMA = """
CREATE TABLE models (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, at REAL NOT NULL, record TEXT NOT NULL, sum TEXT NOT NULL)
"""
_MOST_ROWS = 200
_SETS = {"starts", "structure"}
_LISTS = {"switches", "dates"}
_ROUND = 1024  # a context is told in whole thousands


def probe_model(
    settings: Settings, loaded: LoadedModel, generate: Generate | None, say: Callable[[str], None]
) -> Generator[float, None, LoadedModel]:
    """The model with all its capabilities. Pauses while others work for it, and after each token that it answers.

    Args:
        generate: how it answers a prompt; ``None``: it is not asked (MODEL_PROBE=off).
        say: gets a line about a model that was asked for the first time.
    """
    path, key = settings.cache_dir / FILE, probe_key(loaded.files)
    result = yield from in_background(lambda: read_probe(path, key))
    if result is None or (generate is not None and result.trial.outcome == "open"):
        try:
            found = yield from _probe(loaded, generate)
        except TemplateError:  # whoever builds the prompts of this model says why it cannot be served
            return loaded
        result = found
        yield from in_background(lambda: keep_probe(path, key, loaded.name, found))
        if generate is not None:
            say(f"probe     {found.trial.report(loaded.capabilities.tool_parser)}")
    return replace(loaded, capabilities=loaded.capabilities.with_probe(result))


def _probe(loaded: LoadedModel, generate: Generate | None) -> Generator[float, None, ProbeResult]:
    """Raises TemplateError: the template cannot render one user message."""
    template, tokenizer, traits = yield from in_background(lambda: _render(loaded))
    family, hints = loaded.capabilities.family.value, loaded.capabilities.hints
    assert hints is not None, "the tokenizer of a loaded model was read"
    trial = ToolCallProbe("open", why="MODEL_PROBE is off")
    if generate is not None:
        assumed = hints.facts(family)
        expected = ExpectedStyle(
            (assumed["tool_parser"].value, *family.tool_parsers),
            assumed["reasoning_parser"].value,
            hints.think_tags,
            loaded.tool_format,
        )
        detokenizer = lambda: loaded.wrapper.detokenizer  # noqa: E731
        trial = yield from probe_tool_calls(template, tokenizer, traits, expected, detokenizer, generate)
    return ProbeResult(family.name, hints, traits, trial)


def _render(loaded: LoadedModel) -> tuple[HFTemplate, HFTokenizer, Traits]:
    """Raises TemplateError."""
    template, tokenizer = HFTemplate(loaded.tokenizer), HFTokenizer(loaded.tokenizer, eos_ids=loaded.eos)
    return template, tokenizer, probe(template, tokenizer)


def limit_context(loaded: LoadedModel, most_tokens: int | None, say: Callable[[str], None]) -> LoadedModel:
    """The model with the context that its KV finds room for, if that is less than its own.

    Args:
        most_tokens: of one request beside the weights; ``None``: nobody knows.
    """
    capabilities = loaded.capabilities
    if most_tokens is None or most_tokens >= capabilities.context:
        return loaded
    practical = max(LEAST_CONTEXT, most_tokens // _ROUND * _ROUND)
    say(f"context   {practical:,} tokens of KV fit into memory; {loaded.name} could take {capabilities.context:,}")
    return replace(loaded, capabilities=replace(capabilities, memory_context=practical))


# --- the file ---------------------------------------------------------------------------------


def probe_key(files: str) -> str:
    """The row of a checkpoint. `files`: `fingerprint.fingerprint` of its folder."""
    digest = hashlib.sha256(f"{PROBE_VERSION} {files}".encode())
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f" {library} {version(library)}".encode())
    return digest.hexdigest()


def read_probe(path: Path, key: str) -> ProbeResult | None:
    """What an earlier load found out. ``None``: nothing, or the file cannot be read now. Any thread."""

    def read(connection: sqlite3.Connection) -> ProbeResult | None:
        row = connection.execute("SELECT record, sum FROM models WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        record, checksum = row
        if not isinstance(record, str) or _checksum(key, record) != checksum:
            raise Damaged("a row is not what was written")
        return decode(record)

    return _run(path, read)


def keep_probe(path: Path, key: str, name: str, result: ProbeResult) -> None:
    """A file that cannot be written now is logged once. Any thread."""
    record = encode(result)
    values = (key, name, time.time(), record, _checksum(key, record))

    def write(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT OR REPLACE INTO models (key, name, at, record, sum) VALUES (?, ?, ?, ?, ?)", values)
        newest = "SELECT key FROM models ORDER BY at DESC LIMIT ?"
        connection.execute(f"DELETE FROM models WHERE key NOT IN ({newest})", (_MOST_ROWS,))

    _run(path, write)


def _run[T](path: Path, work: Callable[[sqlite3.Connection], T]) -> T | None:
    database = CacheDatabase(path, _SCHEMA, 1, what="what models can do")
    try:
        return database.run(work)
    except FileUnavailable:
        return None
    finally:
        database.close()


def encode(result: ProbeResult) -> str:
    data = asdict(result)
    data["traits"] = {name: sorted(v) if name in _SETS else v for name, v in data["traits"].items()}
    return json.dumps(data, ensure_ascii=False, sort_keys=True)


def decode(record: str) -> ProbeResult:
    """Raises Damaged."""
    try:
        data: dict[str, Any] = json.loads(record)
        traits: dict[str, Any] = data["traits"]
        traits |= {name: frozenset(traits[name]) for name in _SETS} | {name: tuple(traits[name]) for name in _LISTS}
        hints: dict[str, Any] = data["hints"]
        hints["think_tags"] = hints["think_tags"] and tuple(hints["think_tags"])
        found = {"hints": WritingHints(**hints), "traits": Traits(**traits), "trial": ToolCallProbe(**data["trial"])}
        return ProbeResult(**data | found)
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged("a row cannot be read") from error


def _checksum(key: str, record: str) -> str:
    return hashlib.sha256(f"{key} {record}".encode()).hexdigest()
