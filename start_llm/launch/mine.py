"""``launch --my-config``: the user's own skills, MCP servers, theme and the like, in an agent's private folder.

They are copies that nobody can write to: the agent does not reach the user's own files. What was brought is noted in
the private folder and goes again at the next launch, so that a launch without the flag is private.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import tomlkit

from start_llm.clients.agent import UserConfig
from start_llm.core.sizes import as_size
from start_llm.files.atomic import write_atomic

NOTE = ".brought.json"
MOST_FILES, MOST_BYTES = 5_000, 100 << 20
_MISSING = object()

Say = Callable[[str], None]


def config_folder(config: UserConfig, environment: Mapping[str, str]) -> Path:
    """Where the agent keeps the user's own set-up."""
    named = environment.get(config.variable) if config.variable else None
    return Path(named) if named else Path(environment.get("HOME") or Path.home()) / config.folder


def bring(config: UserConfig, folder: Path, environment: Mapping[str, str], say: Say) -> list[str]:
    """Copies into the private `folder` what `own` names. Returns the names of what was there to bring.

    Args:
        say: is told what could not be brought.
    """
    source = config_folder(config, environment)
    if not config.folder or not source.is_dir() or source.resolve() == folder.resolve():
        return []
    bringer = _Bringer(source, folder, say)
    try:
        for name in config.copied:
            bringer.copy(name)
        for name, keys in config.fields.items():
            bringer.set(name, keys)
    finally:
        write_atomic(folder / NOTE, json.dumps({"copied": bringer.copied, "fields": bringer.changed}))
    return bringer.names


def take_away(config: UserConfig, folder: Path) -> None:
    """Removes what an earlier launch has brought; what the agent has made there itself stays."""
    try:
        note = json.loads((folder / NOTE).read_text("utf-8"))
        copied, changed = list(note["copied"]), dict(note["fields"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    for path in map(str, copied):
        # Only a name that `bring` may have noted: one of `config`, or right inside of it.
        if ".." not in Path(path).parts and any(path == name or path.startswith(f"{name}/") for name in config.copied):
            _remove(folder / path)
    for name, keys in config.fields.items():
        values = changed.get(name)
        if isinstance(values, dict):
            _unset(folder / name, {key: values[key] for key in keys if key in values})
    (folder / NOTE).unlink(missing_ok=True)


class _Bringer:
    """One launch. `copied`: paths in the private folder; `changed`: by settings file, the values that were set."""

    def __init__(self, source: Path, folder: Path, say: Say) -> None:
        self._source = source
        self._folder = folder
        self._say = say
        self._files, self._bytes = 0, 0
        self.copied: list[str] = []
        self.changed: dict[str, dict[str, Any]] = {}
        self.names: list[str] = []

    def copy(self, name: str) -> None:
        """A file, or what lies in a folder; what the private folder has of that name stays."""
        path = self._source / name
        if path.is_file():
            found = [name]
        elif path.is_dir():
            found = [f"{name}/{child.name}" for child in sorted(path.iterdir()) if not child.name.startswith(".")]
        else:
            return
        before = len(self.copied)
        for each in found:
            self._copy_one(each)
        if len(self.copied) > before:
            self.names.append(name)

    def _copy_one(self, name: str) -> None:
        target = self._folder / name
        if target.exists() or target.is_symlink():
            return
        before = self._files, self._bytes
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tree(self._source / name, target, ())
        except (OSError, ValueError) as error:
            self._say(f"{self._source / name} is not brought along: {error}")
            _remove(target)
            self._files, self._bytes = before
        if target.exists():  # not where a link leads nowhere
            self.copied.append(name)

    def _tree(self, source: Path, target: Path, above: tuple[str, ...]) -> None:
        """Links are followed. Raises OSError, ValueError."""
        if source.is_dir():
            here = os.path.realpath(source)
            if here in above:
                raise ValueError(f"{source} leads back into itself")
            target.mkdir(mode=0o700)
            for child in sorted(source.iterdir()):
                if child.name != ".git":
                    self._tree(child, target / child.name, (*above, here))
            target.chmod(0o500)
        elif source.is_file():
            status = source.stat()
            self._files, self._bytes = self._files + 1, self._bytes + status.st_size
            if self._files > MOST_FILES or self._bytes > MOST_BYTES:
                raise ValueError(f"more than {MOST_FILES:,} files or {as_size(MOST_BYTES)} in all")
            shutil.copyfile(source, target)
            target.chmod(0o500 if status.st_mode & stat.S_IXUSR else 0o400)

    def set(self, name: str, keys: Sequence[str]) -> None:
        """Takes fields of the user's settings file over into the private one."""
        path, target = self._source / name, self._folder / name
        if name.startswith(".") and not path.is_file():
            path = self._source.parent / name
        if not path.is_file():
            return
        try:
            theirs, ours = _read(path), _read(target) if target.exists() else {}
        except (OSError, ValueError) as error:
            self._say(f"{path} is not brought along: {error}")
            return
        values = {key: _get(theirs, key) for key in keys if _get(ours, key) is _MISSING}
        values = {key: value for key, value in values.items() if value is not _MISSING}
        if not values:
            return
        for key, value in values.items():
            *parents, last = key.split(".")
            reduce(lambda data, part: data.setdefault(part, {}), parents, ours)[last] = value
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(target, ours)
        self.changed[name] = values
        self.names += list(values)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for folder, _, _ in os.walk(path):
            with suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unset(path: Path, values: Mapping[str, Any]) -> None:
    """Takes fields away that still have these values: others the agent has set itself since."""
    try:
        data = _read(path)
    except (OSError, ValueError):
        return
    for key, value in values.items():
        if _get(data, key) == value:
            *parents, last = key.split(".")
            del reduce(dict.__getitem__, parents, data)[last]
    _write(path, data)


# --- settings files: JSON, or TOML by their name ------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    text = path.read_text("utf-8")
    data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    return data


def _write(path: Path, data: dict[str, Any]) -> None:
    write_atomic(path, tomlkit.dumps(data) if path.suffix == ".toml" else json.dumps(data, indent=2) + "\n")


def _get(data: Any, key: str) -> Any:
    """The value at ``a.b``, or `_MISSING`."""
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return _MISSING
        data = data[part]
    return data
