"""Reads and writes the user's file for a model, which corrects what was found out: ``models/NAME.toml``. Knows no MLX.

``NAME`` is the repository with ``--`` for the ``/`` (``owner--model.toml``), or its last part alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tomlkit

from start_llm.core.errors import NotSupported
from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.files.atomic import write_atomic
from start_llm.models.checkpoint import is_path
from start_llm.models.family import families, nearest
from start_llm.parsing.registry import TOOL_FORMATS
from start_llm.prompt.traits import Traits

FOLDER = Path("models")
"""Of these files; in START_LLM_HOME, where a server runs."""
KEYS = ("family", "context", "thinking", "pinned", "ttl", "tool_parser", "reasoning_parser", "template", "sampling")
SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0.01, 1),
    "top_k": (0, 1_000_000),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 2),
}
"""Values that a request may leave out: the least and the most of each."""
LEAST_CONTEXT = 256
TRAIT_NAMES = tuple(field.name for field in fields(Traits) if field.name not in {"starts", "structure", "fingerprint"})
"""Facts of a template that people are shown, and that a model's own file may set."""
_MOST = 1e9
_PLAIN: Mapping[str, tuple[tuple[type, ...], int, str]] = {
    **dict.fromkeys(("thinking", "pinned"), ((bool,), 0, "true or false")),
    "ttl": ((int, float), 0, "a number of seconds; 0: it stays"),
    "context": ((int,), LEAST_CONTEXT, f"a number of tokens, at least {LEAST_CONTEXT}"),
}
"""Of keys whose values are switches or numbers: their types, the least value, and what is allowed, for people."""
_TABLE, _SAMPLING = "template", "sampling"
EDITED = ("context", "thinking", "pinned", "ttl", *(f"{_SAMPLING}.{name}" for name in SAMPLING))
"""Keys that the page and `models set` change; all others are for an editor."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Keys of ``[template]`` and ``[sampling]`` begin with that word and a point."""

    path: Path | None = None  # the file, ``None`` where there is none
    values: Mapping[str, Any] = field(default_factory=dict)

    def table(self, name: str) -> dict[str, Any]:
        head = f"{name}."
        return {key.removeprefix(head): value for key, value in self.values.items() if key.startswith(head)}


def names_of(source: str) -> tuple[str, ...]:
    """What the file of the model `source` may be called, without its ending; the first is for a new one."""
    last = source.rstrip("/").rsplit("/", 1)[-1]
    whole = source.strip("/").replace("/", "--")
    return tuple(dict.fromkeys((last, whole) if is_path(source) else (whole, last)))


def read_overrides(folder: Path, source: str) -> Overrides:
    """The file of the model `source` (a repository, a folder, a name).

    Raises NotSupported: one sentence with the file, the key, the value and what is allowed.
    """
    for name in names_of(source):
        path = folder / f"{name}.toml"
        try:
            text = path.read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise NotSupported(f"{path} cannot be read: {error}.") from error
        return Overrides(path, _values(path, text))
    return Overrides()


def write_overrides(folder: Path, source: str, changes: Mapping[str, Any]) -> Overrides:
    """Changes keys of `EDITED` in the model's file, and leaves all else in it as it is; ``None`` takes a key out.

    Raises NotSupported: nothing is written, and why.
    """
    unknown = next((key for key in changes if key not in EDITED), None)
    if unknown is not None:
        raise NotSupported(f"{unknown!r} is no key{nearest(unknown, EDITED)}; there are {', '.join(EDITED)}.")
    path = read_overrides(folder, source).path or folder / f"{names_of(source)[0]}.toml"
    document = tomlkit.parse(path.read_text("utf-8") if path.exists() else "")
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        place: Any = document.setdefault(table, tomlkit.table()) if table else document
        if value is None:
            place.pop(name, None)
        elif isinstance(value, bool | int | float | str):
            place[name] = value
        else:
            raise NotSupported(f"{key}={value!r:.80} is neither a number nor a word.")
    text = tomlkit.dumps(document)
    after = Overrides(path, _values(path, text))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text, mode=0o666)
    except OSError as error:
        raise NotSupported(f"{path} cannot be written: {error}.") from error
    return after


def _values(path: Path, text: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotSupported(f"{path} is no TOML: {error}.") from error
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key not in KEYS:
            raise NotSupported(f"{path}: {key!r} is no key{nearest(key, KEYS)}.")
        allowed = {_TABLE: TRAIT_NAMES, _SAMPLING: tuple(SAMPLING)}.get(key)
        if allowed is None:
            found[key] = _checked(path, key, value)
            continue
        if not isinstance(value, dict):
            raise NotSupported(f"{path}: {key}={value!r} must be a table: [{key}].")
        for name, fact in value.items():
            if name not in allowed:
                raise NotSupported(f"{path}: {key}.{name!s} is no key{nearest(name, allowed)}.")
            found[f"{key}.{name}"] = _checked(path, f"{key}.{name}", fact)
    return found


def sampling_number(name: str, value: Any) -> float | None:
    """The same value; ``None`` if it is no number that `SAMPLING` allows."""
    least, most = SAMPLING[name]
    kinds = (int,) if name == "top_k" else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
    return value if fits else None


def sampling_range(name: str) -> str:
    """What is allowed, for people."""
    least, most = SAMPLING[name]
    return f"{'a whole number' if name == 'top_k' else 'a number'} from {least:,} to {most:,}"


def _checked(path: Path, key: str, value: Any) -> Any:
    """The value; a trait in the kind that `Traits` has, where an empty text is ``None``."""
    words = {"family": families(), "tool_parser": TOOL_FORMATS, "reasoning_parser": REASONING_STYLES}.get(key)
    if words is not None:
        if not isinstance(value, str) or value not in words:
            raise NotSupported(f"{path}: {key}={value!r} is not known{nearest(str(value), words)}.")
        return value
    table, _, name = key.rpartition(".")
    if table == _SAMPLING:
        fits, said = sampling_number(name, value) is not None, sampling_range(name)
    elif table == _TABLE:
        fits, said = _trait(name, value)
    else:
        kinds, least, said = _PLAIN[key]
        fits = type(value) in kinds and least <= value < _MOST
    if not fits:
        raise NotSupported(f"{path}: {key}={value!r} must be {said}.")
    if table == _TABLE and isinstance(value, str | list):
        return tuple(value) if isinstance(value, list) else value or None
    return value


def _trait(name: str, value: Any) -> tuple[bool, str]:
    """Whether a trait may have the value, and what is allowed, for people."""
    hint = get_type_hints(Traits)[name]
    if hint is bool:
        return isinstance(value, bool), "true or false"
    if name == "calls":
        return value in ("", "mapping", "string"), '"mapping", "string" or ""'
    if type(None) in get_args(hint):
        return isinstance(value, str), 'a text; "" is none'
    return isinstance(value, list) and all(isinstance(part, str) for part in value), "a list of texts"
