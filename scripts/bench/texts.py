"""Made-up work: system prompts, tools, files, tasks. Deterministic for a seed."""

from __future__ import annotations

import random
from typing import Any

from scripts.bench.agent import Step

Json = dict[str, Any]

_NOUNS = (
    "file",
    "test",
    "module",
    "function",
    "parser",
    "cache",
    "token",
    "server",
    "request",
    "branch",
    "option",
    "value",
    "path",
    "buffer",
    "record",
)
_VERBS = (
    "read",
    "write",
    "check",
    "update",
    "move",
    "split",
    "merge",
    "return",
    "open",
    "close",
    "count",
    "match",
    "store",
    "render",
    "follow",
)
_ADJECTIVES = (
    "small",
    "new",
    "stale",
    "empty",
    "shared",
    "long",
    "first",
    "last",
    "missing",
    "broken",
    "local",
    "hidden",
    "partial",
)
_TOOLS = {
    "read": ("Read a file and return its lines.", {"path": "string", "limit": "number", "offset": "number"}),
    "bash": ("Run a shell command in the repository and return what it prints.", {"command": "string"}),
    "edit": (
        "Replace one exact text in a file by another.",
        {"path": "string", "old_text": "string", "new_text": "string"},
    ),
    "grep": ("Search the files for a regular expression.", {"pattern": "string", "path": "string"}),
    "todo": ("Write down what is left to do.", {"items": "string", "done": "boolean"}),
}


class Writer:
    """Text of a session. Two writers with other seeds share no line of any length."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.random = random.Random(seed)

    def sentence(self) -> str:
        pick = self.random.choice
        return (
            f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} must {pick(_VERBS)} every {pick(_ADJECTIVES)} {pick(_NOUNS)} "
            f"before the {pick(_NOUNS)} can {pick(_VERBS)} {self.random.randrange(1000)} of them."
        )

    def prose(self, lines: int) -> str:
        return "\n".join(self.sentence() for _ in range(lines))

    def code(self, lines: int) -> str:
        pick, number = self.random.choice, self.random.randrange
        made = []
        for i in range(lines):
            a, b, c = pick(_NOUNS), pick(_VERBS), pick(_NOUNS)
            made.append(f"{i + 1:4d}|    {a}_{number(100)} = {b}_{c}({pick(_NOUNS)}, limit={number(5000)})")
        return "\n".join(made)

    def system(self, lines: int = 100) -> str:
        return f"You are agent {self.seed}, a coding assistant.\n\n# How to work\n{self.prose(lines)}"

    def tools(self) -> list[Json]:
        made = []
        for name, (description, fields) in _TOOLS.items():
            properties = {key: {"type": kind, "description": self.sentence()} for key, kind in fields.items()}
            schema = {"type": "object", "properties": properties, "required": list(fields)[:1]}
            function = {"name": name, "description": f"{description} {self.sentence()}", "parameters": schema}
            made.append({"type": "function", "function": function})
        return made

    def path(self) -> str:
        return f"src/{self.random.choice(_NOUNS)}_{self.random.randrange(10000)}.py"

    def task(self, lines: int = 3) -> str:
        return f"Please {self.random.choice(_VERBS)} {self.path()}.\n{self.prose(lines)}"

    def call(self) -> tuple[str, Json]:
        kind = self.random.randrange(4)
        if kind == 0:
            return "read", {"path": self.path(), "limit": self.random.randrange(50, 500)}
        if kind == 1:
            return "bash", {"command": f"cd {self.path()} && python -m pytest -q 2>&1 | tail -n 5"}
        if kind == 2:
            return "edit", {"path": self.path(), "old_text": self.code(3), "new_text": self.code(3) + '\n    "done": é'}
        return "grep", {"pattern": r"def \w+_" + str(self.random.randrange(100)), "path": "src"}

    def steps(
        self, calls: int = 0, reasoning: bool = False, answer_lines: int = 4, result_lines: int = 15
    ) -> list[Step]:
        """`calls` tool calls, then an answer."""
        made = [
            Step(self.sentence(), self.thought(reasoning), self.call(), self.code(result_lines)) for _ in range(calls)
        ]
        return [*made, Step(self.prose(answer_lines), self.thought(reasoning))]

    def thought(self, wanted: bool) -> str:
        return self.prose(3) if wanted else ""
