"""Takes keys out of text before it is written down for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "[redacted]"
_SHORTEST = 6  # a key of fewer characters would hide ordinary words

_TOKENS = re.compile(
    r"\b(?:(?:sk|rk|pk|hf|ghp|gho|ghs|glpat|npm|pypi|xox[abprs])[-_][\w\-.]{15,}\w|ya29\.[\w-]{16,}"
    r"|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,400}\.[\w-]{8,4000}\.[\w-]{8,})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9_\-.=+/]{8,}")
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|secret|passwd|password|access[_-]?token|auth[_-]?token|private[_-]?key)[\w.-]{0,40}"
    r"[\"']?\s{0,3}[=:]\s{0,3}[\"']?)([^\s\"',;(){}\[\]<>]{6,})"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


class Redactor:
    """Args: `known`: keys that are known to be secret, whatever they look like."""

    def __init__(self, known: Iterable[str | None] = ()) -> None:
        words = sorted({word for word in known if word and len(word) >= _SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, words))) if words else None

    def text(self, text: str) -> str:
        """`text` with `HIDDEN` in place of what is a key, or looks like one."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _PEM.sub(HIDDEN, text)
        text = _TOKENS.sub(HIDDEN, text)
        text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
        return _NAMED.sub(rf"\1{HIDDEN}", text)

    def all(self, value: Any) -> Any:
        """JSON data with every text in it redacted, names of fields too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(name)): self.all(each) for name, each in value.items()}
        return [self.all(each) for each in value] if isinstance(value, list | tuple) else value
