"""The adapters that requests may name: the folders in ADAPTERS_DIR. Knows no MLX.

A name is a folder's plain name, never a path, so that no request reaches anything else.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from start_llm.core.errors import BadRequest, StartLLMError
from start_llm.core.limits import ADAPTER
from start_llm.models.adapter import CONFIG, WEIGHTS, Adapter, look_at, other_base, read_adapter, stamp_of

log = logging.getLogger(__name__)

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{ADAPTER.most - 1}}}")


@dataclass(frozen=True)
class Chosen:
    """An adapter that lies in the folder.

    Attributes:
        base: the model that it was trained on, as its maker wrote it; empty: not told.
        size: bytes of its weights.
        stamp: changes when its files do.
        problem: why it cannot be used, in a sentence; empty if nothing shows without its weights.
        links: other names of it: links in the folder that lead to the same files.
    """

    name: str
    folder: Path
    base: str
    size: int
    stamp: str
    problem: str = ""
    links: tuple[str, ...] = field(default=(), compare=False)

    def read(self) -> Adapter:
        """Raises NotFound, BadRequest."""
        return replace(read_adapter(self.folder, _told(self.name)), name=self.name)

    def fits(self, *names: str) -> bool:
        """Whether it was trained on a model that is called like one of these, or does not say on which."""
        return any(other_base(self.base, name) is None for name in names)


def check_name(name: str, param: str) -> str:
    """The same name. Raises BadRequest unless it is a plain one. `param`: the field of the request."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{param}: {name[:60]!r} is no adapter's name; give up to {ADAPTER.most} letters, digits, '.', '_', '-', "
            "of which the first is a letter or a digit.",
            param=param,
            code="invalid_value",
        )
    return name


class Adapters:
    """What lies in the folder now. Any thread; a look costs two file headers where files have changed, else nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: dict[str, Chosen] = {}

    def find(self, name: str) -> Chosen | None:
        """The adapter of that plain name. By a link's name it is the one that the link leads to."""
        if not _NAME.fullmatch(name):
            return None
        names = self._names_of(name)
        if not names:
            return None
        name, *links = names
        folder = self._folder / name
        stamp = stamp_of(folder)
        with self._lock:
            seen = self._seen.get(name)
        if seen is not None and stamp and seen.stamp == stamp:
            return replace(seen, links=tuple(links))
        if not folder.is_dir():
            return None
        found = replace(_look(name, folder, stamp), links=tuple(links))
        with self._lock:
            self._seen[name] = found
        return found

    def all(self) -> tuple[Chosen, ...]:
        """By name, each once. A folder without a configuration is none."""
        try:
            names = sorted(path.name for path in self._folder.iterdir() if (path / CONFIG).exists())
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("the adapters cannot be listed now: %s", error)
            return ()
        found = {each.name: each for name in names if (each := self.find(name)) is not None}
        return tuple(found.values())

    def _names_of(self, name: str) -> list[str]:
        """All names of the same adapter: its folder's own first, then those of links, by name. Empty: there is none.

        A disk that takes ``Titles`` for ``titles`` would else have one adapter be as many models as it has spellings.
        """
        target = os.path.realpath(self._folder / name)
        try:
            with os.scandir(self._folder) as entries:
                there = {each.name: each.is_symlink() for each in entries}
        except OSError:
            return [name]
        if name not in there:
            return []
        links = sorted(each for each, is_link in there.items() if is_link and _NAME.fullmatch(each))
        links = [link for link in links if os.path.realpath(self._folder / link) == target]
        place, own = os.path.split(target)
        if place == os.path.realpath(self._folder) and _NAME.fullmatch(own):
            return [own, *links]
        return links or [name]


def _look(name: str, folder: Path, stamp: str) -> Chosen:
    try:
        adapter = look_at(folder, _told(name))
        return Chosen(name, folder, adapter.base, (folder / WEIGHTS).stat().st_size, stamp)
    except StartLLMError as error:
        return Chosen(name, folder, "", 0, stamp, error.message)
    except OSError as error:
        return Chosen(name, folder, "", 0, stamp, f"{_told(name)} cannot be read ({error.strerror}).")


def _told(name: str) -> str:
    return f"The adapter {name!r}"
