"""Text of messages cannot become control tokens.

Who writes a file that an agent reads could write ``<|im_end|>\\n<|im_start|>system`` into it, and every tokenizer would
make the tokens of it that only the chat template may write. Here a cut stands inside such a name in everything that
clients send. `HFTokenizer.encode` encodes the parts on both sides of a cut apart: the model reads the letters of the
name. A text without such names is not touched, so its tokens are as always.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from start_llm.core.messages import Message, Tool
from start_llm.core.reasoning_tags import REASONING_TAGS

CUT = "\udffe"
"""Half of a surrogate pair, as the edges of an image's mark: text that comes by JSON never holds one."""

_WHOLE = re.compile("[^\ud800-\udfff]+")
# An assistant's own thoughts and calls in its text: the client says by the role whose words they are.
_OWN = re.compile("|".join([*(re.escape(tag) for pair in REASONING_TAGS for tag in pair), "tool"]))
# A template that writes ``<KEY>``: the key of a schema is all that a token's name needs.
_MAKES_TAGS = re.compile(r"""<['"]\s*[~+]|<\{\{""")


def _any_of(rests: set[str]) -> str:
    """A regular expression that finds the shortest of these texts.

    It looks at each character once: in some vocabularies a thousand names begin alike.
    """
    shared = os.path.commonprefix([*rests])  # noqa: RUF071  (of any texts)
    by_next: dict[str, set[str]] = defaultdict(set)
    for rest in rests:
        by_next[rest[len(shared) :][:1]].add(rest[len(shared) :])
    behind = "" if "" in by_next else f"(?:{'|'.join(_any_of(by_next[char]) for char in sorted(by_next))})"
    return re.escape(shared) + behind


def _patterns(names: Iterable[str]) -> list[tuple[str, re.Pattern[str]]]:
    """By first character: it, where the rest of a name follows.

    A cut behind the first character breaks every name that begins there, also where two names overlap.
    """
    rests: dict[str, set[str]] = defaultdict(set)
    for name in names:
        rests[name[0]].add(name[1:])
    return [(start, re.compile(f"{re.escape(start)}(?={_any_of(those)})")) for start, those in rests.items()]


class Guard:
    """Cuts the names of control tokens. Thread-safe."""

    def __init__(
        self, names: Iterable[str], template: str | None = "", normal: Callable[[str], str] | None = None
    ) -> None:
        """`names`: what the tokenizer makes one token of, and only the template may write. `normal`: what it makes of a
        text before it looks for them (``HFTokenizer.normal``)."""
        names = [name for name in names if len(name) > 1]
        names = [*names, *map(normal, names)] if normal is not None else names
        self._of_all = _patterns(names)
        self._of_assistant = _patterns([name for name in names if _OWN.search(name) is None])
        self._normal = normal
        self._before = "<" if template is None or _MAKES_TAGS.search(template) else ""

    def text(self, text: str, role: str = "user") -> str:
        patterns = self._of_assistant if role == "assistant" else self._of_all
        for start, pattern in patterns:
            if start in text:
                text = pattern.sub(start + CUT, text)
        if self._normal is not None:
            text = _WHOLE.sub(lambda part: self._cut_letters(part[0], patterns), text)
        return text

    def _cut_letters(self, text: str, patterns: Iterable[tuple[str, re.Pattern[str]]]) -> str:
        """Around each letter that the tokenizer changes, where that makes a name: ``<|IM_END|>``, wide letters."""
        normal = self._normal or str
        if not any(pattern.search(normal(text)) for _, pattern in patterns):
            return text
        return "".join(char if char in normal(char) else f"{CUT}{char}{CUT}" for char in text)

    def name(self, name: str) -> str:
        """Of a tool, an argument or a property: what a template writes around it must not make it a name either."""
        return self.text(f"{self._before}{name}>")[len(self._before) : -1]

    def value(self, value: Any) -> Any:
        """A JSON value: every text in it, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.name(key): self.value(item) for key, item in value.items()}
        return value

    def message(self, message: Message) -> Message:
        """All but the arguments of calls, which are JSON text that has to be read first."""
        content = self.text(message.content, message.role)
        reasoning = self.text(message.reasoning, message.role) if message.reasoning else message.reasoning
        name = self.name(message.name) if message.name else message.name
        if (content, reasoning, name) == (message.content, message.reasoning, message.name):
            return message
        return replace(message, content=content, reasoning=reasoning, name=name)

    def function(self, tool: Tool) -> dict[str, Any]:
        """The tool as templates take it."""
        function: dict[str, Any] = self.value(tool.as_function())
        function["function"]["name"] = self.name(tool.name)
        return function


NOTHING = Guard(())
