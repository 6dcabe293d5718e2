"""The families of `models/families` and which of them a model belongs to. Knows no MLX."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from start_llm.core.errors import NotSupported

GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class Family:
    """See `models/families`. `name` is that of the file."""

    name: str
    title: str
    tool_parsers: tuple[str, ...]
    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    reasoning_parser: str | None = None
    efforts: tuple[str, ...] = ()


@cache
def families() -> Mapping[str, Family]:
    """All of them, by name."""
    found = dict[str, Family]()
    for file in sorted(files("start_llm.models.families").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            values = tomllib.loads(file.read_text("utf-8"))
            lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
            name = file.name.removesuffix(".toml")
            found[name] = Family(name, **values | lists)
    return found


def chosen_family(setting: str) -> Family:
    """MODEL_FAMILY. Raises NotSupported."""
    if setting not in families():
        raise NotSupported(f"MODEL_FAMILY={setting}: there is no such family{nearest(setting, families())}.")
    return families()[setting]


def detect_family(config: Mapping[str, Any], name: str, vocab: Iterable[str] = ()) -> Family:
    """From the model's name, else its architecture, else its vocabulary. Of several that fit, the longest sign counts.

    The name comes first: fine-tunes keep the architecture of another family (Kimi K2 has DeepSeek's).
    """
    lowered, kind, words = name.lower(), str(config.get("model_type", "")).lower(), set(vocab)
    known = families().values()
    fitting = (
        [(len(sign), family.name) for family in known for sign in family.names if sign in lowered]
        or [(len(sign), family.name) for family in known for sign in family.types if kind.startswith(sign)]
        or [(len(sign), family.name) for family in known for sign in family.tokens if sign in words]
    )
    return families()[max(fitting)[1] if fitting else GENERIC]


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a word that is not known."""
    names = list(known)
    near = difflib.get_close_matches(word, names, 1, 0.5)
    return f"; the nearest one is {near[0]!r}" if near else f"; allowed are {', '.join(sorted(names))}"
