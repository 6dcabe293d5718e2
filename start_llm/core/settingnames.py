"""Names of settings that nobody knows: a misspelt one would be passed over without a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

RETIRED = {
    "PROMPT_CACHE_BLOCK_SIZE": "stored prefixes are compared token by token, not by block",
    "CACHE_USE_BLOCK_INDEX": "a lookup walks the tree of stored prefixes, which is exact and faster than an index",
    "CACHE_VLM_IMAGE_IDENTITY": "an image's pixels are always part of what stored KV is found by",
    "CACHE_SESSION_PARTITIONING": "stored KV is found whichever session made it",
    "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": "the model always sees what the client sent",
}
"""Names of older configurations, and why there is nothing to set any more."""
_LIKE = 0.6  # how alike the nearest name must be to be worth telling
_SURELY_MEANT = 0.85  # and so that a variable of the process, where anything may stand, was meant to be ours


def unknown(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """A sentence for each name that is neither a setting nor retired. Case does not matter."""
    settings = list(known)
    return [
        f"{name} is no setting of start_llm{_hint(name, settings)}"
        for name in names
        if name.upper() not in settings and name.upper() not in RETIRED
    ]


def doubtful(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """A sentence for each variable that does nothing although somebody may think so: retired or misspelt."""
    settings = list(known)
    sentences = []
    for name in dict.fromkeys(name.upper() for name in names):
        if name in RETIRED:
            sentences.append(f"{name} does nothing any more: {RETIRED[name]}. You can remove it.")
        elif name not in settings and (near := difflib.get_close_matches(name, settings, 1, _SURELY_MEANT)):
            sentences.append(f"{name} is no setting of start_llm; {near[0]} is. It is passed over.")
    return sentences


def _hint(name: str, settings: list[str]) -> str:
    near = difflib.get_close_matches(name.upper(), settings, 1, _LIKE)
    return f"; the nearest one is {near[0]}." if near else "; .env.example lists all of them."


_PLAIN = (
    (", unable to parse string as an integer", ""),
    (", unable to parse string as a number", ""),
    (", unable to interpret input", ""),
    ("Value error, ", ""),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid boolean", "true or false"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "more than"),
    ("Input should be", "it must be"),
)


def plain(message: str) -> str:
    """What pydantic says of a bad value, in words for somebody who sets one."""
    for theirs, ours in _PLAIN:
        message = message.replace(theirs, ours)
    return message
