"""MODEL_MAP: which model answers who asks for a name. One table, read once; nothing here knows what is loaded.

``claude-haiku-*=small,*-mini=small``: the first pattern that fits counts. ``*`` is any text, ``?`` one character, and
every other character is itself (``claude-opus[1m]`` is a name). Case does not matter. A pattern without a ``/`` also
fits a name behind its last ``/``: ``openai/gpt-5-mini``. ``@side=small`` is about what is asked, not about a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

MAIN_NAME = "default"
"""Means the main model, whatever that is called."""
MOST_NAME = 256
"""Characters of a name that is looked up; a longer one is no model's."""
PROXIED = "asked:"
"""Stands before names that come through the proxy: LiteLLM takes a bare ``claude-...`` for Anthropic's own model."""
SIDE = "@side"
"""In place of a pattern: the model of side requests, see `side`. No name fits it."""
ADAPTER_SIGN = "+"
"""Stands between a model's name and its adapter's: ``name+adapter``."""
_TARGET = re.compile(r"[^\s,=*?]+")


@dataclass(frozen=True)
class MapEntry:
    """A line of the table."""

    pattern: str  # as it was written
    model: str  # the name that is meant: what clients may ask for, so a repository, a served name or an alias

    def fits(self, name: str) -> bool:
        """At most pattern x name steps: what Python makes of a pattern never goes back behind its last ``*``."""
        pattern, asked = self.pattern.lower().replace("[", "[[]"), name.lower()
        names = [asked] if "/" in pattern else [asked, asked.rpartition("/")[2]]
        return self.pattern != SIDE and any(fnmatchcase(each, pattern) for each in names)


@dataclass(frozen=True)
class ModelMap:
    """Immutable; any thread."""

    entries: tuple[MapEntry, ...] = ()

    @property
    def side(self) -> str | None:
        """The model that answers side requests; ``None``: the main one does."""
        return next((entry.model for entry in self.entries if entry.pattern == SIDE), None)

    def resolve(self, name: str) -> str:
        """The model that `name` means; `name` itself where no pattern fits. Once: what comes out is not looked up."""
        if len(name) > MOST_NAME:
            return name
        return next((entry.model for entry in self.entries if entry.fits(name)), name)


def plain_name(name: str) -> str:
    """The name that the client itself has sent."""
    return name.removeprefix(PROXIED)


def parse_model_map(text: str) -> ModelMap:
    """Reads ``pattern=model,pattern=model``; line breaks separate as commas do. Raises ValueError: one sentence that
    names the entry and what is wrong with it."""
    entries: list[MapEntry] = []
    seen: set[str] = set()
    for part in re.split(r"[,\n]", text):
        written = part.strip()
        if not written:
            continue
        pattern, equals, model = (word.strip() for word in written.partition("="))
        if not equals or not pattern or not model:
            raise ValueError(f"{written!r} is no entry; write pattern=model, e.g. claude-haiku-*=small")
        if re.search(r"\s", pattern):
            raise ValueError(f"{written!r}: a pattern has no spaces in it; entries are separated by commas")
        if len(pattern) > MOST_NAME:
            raise ValueError(f"{pattern[:40]!r}...: a pattern has at most {MOST_NAME} characters")
        if not _TARGET.fullmatch(model):
            raise ValueError(f"{written!r}: {model!r} is no model's name; patterns stand left of the =")
        if pattern.lower() in seen:
            raise ValueError(f"{written!r}: the pattern {pattern!r} stands in the table twice")
        seen.add(pattern.lower())
        entries.append(MapEntry(SIDE if pattern.lower() == SIDE else pattern, model))
    return ModelMap(tuple(entries))
