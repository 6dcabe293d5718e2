"""How the clients of `test_belongs` write a conversation down: where each of them puts what changes by itself.

A *place* is somewhere that a client is known to change: a line of its system text, a reminder, a message's id, a tool,
a file. What stands there is a *value*: a word that occurs nowhere else, so that a prompt can be searched for it. Words
that belong to one conversation alone look like ``qabc012``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PRIVATE = re.compile(r"q[a-z]{3}\d{3}")
SYSTEM, TOOLS, FILES = -1, -2, -3
CLEARED = "[Old tool result content cleared]"
FILES_REPLY = "Ok, any changes I propose will be to those files."
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.044; cc_entrypoint=sdk-cli; cch={};"
SKILLS = 40


class Place(NamedTuple):
    """Where a value stands: in message `where` (its number within the conversation), or in SYSTEM, TOOLS or FILES."""

    where: int
    label: str


Values = Mapping[Place, str | None]
SYSTEM_LINES = {
    "time": "Current time: {}",
    "clock": "Now it is {} UTC.",
    "mode": "Mode: {}",
    "customer": "The customer is {}.",  # a sentence: where it goes, it is not told
    "branch": "Current branch: {}",
    "role": "You are {}, who only says what was done.",
    "house": "In this house one asks before anything is deleted, moved or sent to people outside of it: {} is the name "
    "to ask for, at any time of the day; who is not sure asks a second time, and says in the end what was done.",
    **{f"skill{n:02}": f"* skill number {n}: {{}}, to be used where it helps" for n in range(SKILLS)},
}
TOOL_NAMES = ("read_file", "run_shell", "web_fetch")
TOOL_TEXTS = {name: f"What {name} does: {{}}" for name in TOOL_NAMES}
ROLE = Place(SYSTEM, "role")  # a whole system text of its own, in place of the client's
FILE_NAMES = ("calc.py", "util.py")
RULES = [f"{n}. Rule number {n} of this house: keep every change small and say what was done." for n in range(12)]


@dataclass(frozen=True)
class Kind:
    """A client. `user` and `result` tell the places of its user messages and tool results, and how it writes them.

    Attributes:
        stamps: labels that were true when they were said; a stamp that is gone need not be told.
        clears: takes old tool results out of its history.
        alone: label of the block that may be a user message by itself.
    """

    name: str
    system: str
    user: Mapping[str, str]
    result: Mapping[str, str]
    stamps: frozenset[str] = frozenset()
    clears: bool = False
    alone: str | None = None

    def system_text(self, values: Values) -> str:
        if (role := values.get(ROLE)) is not None:
            return SYSTEM_LINES["role"].format(role)
        lines = [self.system]
        for label, form in SYSTEM_LINES.items():
            value = values.get(Place(SYSTEM, label))
            lines += [form.format(value)] if value is not None else []
        return "\n".join([*lines, *RULES, "Be brief."])

    def user_text(self, text: str, number: int, values: Values) -> str:
        return _with_blocks(text, number, self.user, values)

    def result_text(self, text: str, number: int, values: Values) -> str:
        return _with_blocks(text, number, self.result, values)


def _with_blocks(text: str, number: int, forms: Mapping[str, str], values: Values) -> str:
    """`text` between the blocks of its message; a form that begins with ``^`` stands before it."""
    before, after = [], []
    for label, form in forms.items():
        value = values.get(Place(number, label))
        if value is not None:
            (before if form.startswith("^") else after).append(form.removeprefix("^").format(value))
    return "\n".join([*before, *([text] if text else []), *after])


def files_text(values: Values) -> str | None:
    """aider's block of files, or None if there are none in the chat."""
    files = [(name, values.get(Place(FILES, name))) for name in FILE_NAMES]
    blocks = [f"{name}\n```\nimport os\nVALUE = '{value}'\n```" for name, value in files if value is not None]
    intro = (
        "I have *added these files to the chat* so you can go ahead and edit them.\n\n"
        "*Trust this message as the true contents of these files!*\n"
        "Any other messages in the chat may contain outdated versions of the files' contents.\n"
    )
    return "\n".join([intro, *blocks, ""]) if blocks else None


def _reminder(line: str) -> str:
    return f"<system-reminder>\n{line}\n</system-reminder>"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("unknown", "You are a helpful assistant.", {}, {}),
        Kind(
            "claude",
            f"{BILLING}\nYou are Claude Code, Anthropic's official CLI for Claude.",
            {
                "context": "^" + _reminder("You can use the following context:\n# gitStatus\nCurrent branch: {}"),
                "todo": _reminder("Your todo list has changed: {}"),
                "plan": _reminder("Plan mode is on, do not edit: {}"),
            },
            {"file": _reminder("This file was changed by the user: {}")},
            clears=True,
            alone="todo",
        ),
        Kind(
            "openclaw",
            "<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant running inside OpenClaw.",
            {
                "info": '^Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\n',
                "id": "[message_id: {}]",
                "stats": "\nStats: runtime {}",
                "runtime": "\nRuntime: agent={} | session=agent:main:main | host=dev | shell=bash",
            },
            {},
            stamps=frozenset(["info", "id", "stats"]),
            clears=True,
            alone="runtime",
        ),
        Kind(
            "aider",
            "Act as an expert software developer.\nAlways use best practices when coding.\n"
            "Take requests for changes to the supplied code.",
            {},
            {},
        ),
    )
}

# What users type and tools return. None of it is a client's doing, whatever it looks like.
TYPED = (
    "Go on.",
    "hello",
    "Why?\nTell me more about it.",
    "Delete the record with run_id={}",
    'What is wrong in this?\n\n    session_id="{}"\n    return session_id',
    "The current time is printed wrong in {}.py",
    "The log says\nCurrent time: {}\nand then it ends. Why?",
    "# File editing rules:\nKeep {} as it is.\n\nNow make the change.",
    "This is the git status at the start of the conversation.\nCurrent branch: {}\n\nRecent commits:\n610c949 A\n\nOk?",
    "x-anthropic-billing-header: cc_version={}; cch=12ab3;\nWhat is this line for?",
    "<update>\nMode: {}\n</update>\nWhat does a file with this in it mean?",
)
# These look like what a client writes; a client's own users are not made to type what it writes itself.
TYPED_ELSEWHERE = {
    "claude": ("What is this?\n<system-reminder>\nNever touch {}.\n</system-reminder>",),
    "openclaw": (
        "[message_id: {}] is in every line, why?",
        'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\nWhat is this?',
        "The job is done.\nStats: runtime {}",
        "Explain this:\n<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
    ),
    "aider": ("I have *added these files to the chat* so you can go ahead and edit them.\n\n{}.py\n```\nx = 1\n```",),
}
OUTPUTS = (
    "a = 1\nb = 2",
    "1\timport {}\n2\tprint('Current time:')",
    "ok",
    "Current time: {}\nMode: {}\nnothing else",
    "This was a longer listing.\n" + "some line of a file\n" * 12 + "# {}",
)
LONG = (
    "I have read the whole file and every test of it. The first of the two functions adds where it should subtract, "
    "and the second one divides by the number of all entries though some of them are empty. I am going to change the "
    "first one now, run the tests again, and only then look at the other, since nobody has asked for it so far.",
    "There is nothing to be done here. The record is gone already, the list of open points is empty, the tests pass. "
    "If you want me to look at the rest of the project as well, say so; otherwise I would stop at this point and wait.",
)
ANSWERS = ("OK.", "Done.", LONG[0], LONG[1], "I looked at {}.", "OK.")


def typed_texts(kind: str) -> tuple[str, ...]:
    return (*TYPED, *(text for other, texts in TYPED_ELSEWHERE.items() if other != kind for text in texts))


def fill(text: str, word: str) -> str:
    return text.format(*[word] * text.count("{}")) if "{}" in text else text.replace("{{", "{").replace("}}", "}")


def private_words(text: str) -> set[str]:
    return set(PRIVATE.findall(text))
