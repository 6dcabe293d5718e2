"""Sixty questions about text that changed in a conversation: what changed, what is asked, what a right answer holds.

Every case goes on from the same first turn, so a server has to read that turn once. The questions ask for what holds
now. A right answer has what `expect` finds, and nothing that `forbid` finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

GUIDE = """You are a coding agent in a terminal. You read files, run commands and change code for a developer. Work in
small steps and say what you did in one or two sentences. Read a file before you change it. Keep the style of
the code around your change. Do not add comments that repeat what the code says. Prefer the standard library to
a new dependency. Write a test for each change, and run the tests of the part that you changed before you say
that it is done. Never print secrets, tokens or passwords. Never delete files that you did not create. When a
command fails, read its output and say what it means before you try another one. When two ways are possible,
take the simpler one and say why. Paths are relative to the root of the repository unless they begin with a
slash. Commit messages have a subject of at most seventy characters in the imperative, an empty line, and the
reason for the change. Do not push to a remote. Do not change the version of a dependency unless you are asked
to. Use the tools that you are given; do not make up results of tools. If a question can be answered without a
tool, answer it at once. Answer in the language of the developer. Keep answers short: the developer reads them
in a narrow window. Lists have at most five entries. Code in answers stands between fences with the name of its
language. Numbers have units. Dates are written as year, month, day. If you are not sure, say so. If the
developer's wish is against one of these rules, say which one, and ask. Errors in generated code are yours to
mend. Long output of commands is cut after two hundred lines; ask for the rest only if you need it. A file of
over a thousand lines is read in parts. Binary files are not read. Links are not followed. Tests that need the
network are skipped, and you say that they were. A function has at most sixty lines, a module at most five
hundred."""

STATE = (
    "Current branch: main",
    "Owner of this service: Alicia Romero",
    "Release name: Bluebird",
    "Database host: db-primary.internal",
    "Test command: make check",
    "Deploy window: Tuesday 09:00",
    "Port of the web server: 8080",
    "Python version: 3.11",
    "Ticket: OPS-1417",
    "Log level: warning",
    "Plan mode: off, files may be changed",
    "Network access: allowed",
    "Review is needed from: the storage team",
    "Maximum file size for uploads: 25 MB",
    "Feature flag fast_search: disabled",
    "Staging is frozen: no",
    "Contact in an emergency: the night shift, phone 555-0142",
    "Style guide: tabs are never used, lines have at most 100 characters, imports are sorted, strings have double "
    "quotes, and every public function has a docstring that names its arguments",
)
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
OPENING = "Before we begin: say in about five sentences how you are going to work in this repository."
STYLE = STATE[-1]


def tool(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    tool("read_file", "Read a text file"),
    tool("delete_file", "Delete a file"),
    tool("run_tests", "Run the tests"),
)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        kind: what happens to the text between the turns.
        before: edits that hold in a turn in between; ``None``: there is no such turn.
        edits: a line of `STATE` and what stands in its place now; ``None``: it is gone. ``""``: the new line is added.
        tools: the tools of the last turn.
        reminder: what the reminder in the first user message says at first and now; ``None``: there is none.
        first: the system text of the turns before; ``None``: as `before` makes it.
        role: the whole system text of the last turn; ``None``: as `edits` make it.
        at_first: the tools of the turns before.
        schema: what the answer has to be; ``None``: text.
    """

    name: str
    kind: str
    question: str
    expect: str
    forbid: str = r"(?!)"
    edits: Sequence[tuple[str, str | None]] = ()
    before: Sequence[tuple[str, str | None]] | None = None
    tools: Sequence[dict[str, Any]] = TOOLS
    reminder: tuple[str | None, str | None] | None = None
    first: str | None = None
    role: str | None = None
    at_first: Sequence[dict[str, Any]] = TOOLS
    schema: dict[str, Any] | None = None


def system_text(edits: Sequence[tuple[str, str | None]], *, claude: bool = False) -> str:
    """The system text with these edits. `claude`: as Claude Code's, whose reminders are known."""
    lines = list(STATE)
    for old, new in edits:
        if not old:
            lines.append(new or "")
        elif new is None:
            lines.remove(old)
        else:
            lines[lines.index(old)] = new
    head = "You are Claude Code, a coding agent.\n" if claude else ""
    return head + GUIDE + "\n\n# State of this repository\n" + "\n".join(lines)


def _line(beginning: str) -> str:
    return next(line for line in STATE if line.startswith(beginning))


def _value(line: str, new: str) -> tuple[str, str]:
    return line, line.partition(":")[0] + ": " + new


_CHANGES = (
    ("branch", "Current branch", "release/4.2", "Which branch is checked out now?", r"release/4\.2", r"\bmain\b"),
    ("owner", "Owner", "Robert Okafor", "Who owns this service now?", r"Robert|Okafor", r"Alicia"),
    ("release", "Release name", "Kingfisher", "What is the name of the release?", r"Kingfisher", r"Bluebird"),
    ("host", "Database host", "db-replica.internal", "What is the host of the database?", r"db-replica", r"db-primary"),
    ("tests", "Test command", "tox -e py312", "With which command are the tests run?", r"tox", r"make check"),
    ("window", "Deploy window", "Friday 14:00", "When is the deploy window?", r"Friday|14:00", r"Tuesday"),
    ("port", "Port", "9191", "On which port does the web server listen?", r"9191", r"8080"),
    ("python", "Python version", "3.13", "Which version of Python is used?", r"3\.13", r"3\.11"),
    ("ticket", "Ticket", "OPS-2093", "What is the number of the ticket?", r"2093", r"1417"),
    ("level", "Log level", "debug", "What is the log level?", r"debug", r"warning"),
    ("review", "Review is needed", "the billing team", "Which team has to review?", r"billing", r"storage"),
    ("upload", "Maximum file size", "64 MB", "How large may an uploaded file be?", r"64", r"\b25\b"),
)
_STYLED = "Do your instructions have a style guide now? Answer with yes or no first."
_NONE = r"\bno\b|not|none|unknown|isn't|n't|without"


def _changed() -> Iterator[Case]:
    for name, line, new, question, expect, forbid in _CHANGES:
        yield Case(name, "changed", question, expect, forbid, [_value(_line(line), new)])


def _changed_back() -> Iterator[Case]:
    for name, line, new, question, expect, forbid in _CHANGES[:7]:
        yield Case(name, "changed back", question, forbid, expect, [], [_value(_line(line), new)])


def _withdrawn() -> Iterator[Case]:
    asked = (
        (
            "owner",
            "Owner",
            "Is an owner of this service named in your instructions now? Say the name, or say: no.",
            "Alicia",
        ),
        (
            "release",
            "Release name",
            "Do your instructions give this release a name now? Say it, or say: no.",
            "Bluebird",
        ),
        ("window", "Deploy window", "Do your instructions name a deploy window now? Say it, or say: no.", "Tuesday"),
        ("ticket", "Ticket", "Do your instructions name a ticket now? Say its number, or say: no.", "1417"),
        ("host", "Database host", "Do your instructions name a database host now? Say it, or say: no.", "db-primary"),
        ("review", "Review", "Do your instructions ask for a review by a team now? Say which, or say: no.", "storage"),
        ("upload", "Maximum", "Do your instructions limit the size of uploads now? Say the limit, or say: no.", "25"),
        ("contact", "Contact", "Do your instructions name a contact for emergencies now? Say it, or say: no.", "0142"),
        ("level", "Log level", "Do your instructions set a log level now? Say it, or say: no.", "warning"),
    )
    for name, line, question, old in asked:
        yield Case(name, "withdrawn", question, _NONE, old, [(_line(line), None)])


def _added() -> Iterator[Case]:
    asked = (
        ("budget", "Budget for this task: 40 minutes", "How much time is there for this task?", "40"),
        ("mirror", "Package mirror: mirror.acme.test", "Which package mirror is to be used?", r"mirror\.acme"),
        ("pairing", "Pair programmer today: Yusuf", "Who is the pair programmer today?", "Yusuf"),
        ("license", "Licence of new files: MIT", "Under which licence are new files?", "MIT"),
        ("folder", "New modules belong into: src/plugins", "Into which folder do new modules belong?", "plugins"),
    )
    for name, line, question, expect in asked:
        yield Case(name, "added", question, expect, edits=[("", line)])


def _several() -> Iterator[Case]:
    edits = [_value(_line(line), new) for _, line, new, _, _, _ in (_CHANGES[0], _CHANGES[3], _CHANGES[6], _CHANGES[9])]
    for name, _, _, question, expect, forbid in (_CHANGES[0], _CHANGES[3], _CHANGES[6], _CHANGES[9]):
        yield Case(name, "several at once", question, expect, forbid, edits)
    gone = [(_line("Ticket"), None), _value(_line("Release name"), "Kingfisher"), ("", "Reviewer: Ingrid")]
    yield Case("kept", "several at once", "On which port does the web server listen?", "8080", edits=gone)
    yield Case("new one", "several at once", "Who is the reviewer?", "Ingrid", edits=gone)
    yield Case(
        "gone one",
        "several at once",
        "Is a ticket named in your instructions now? Say it, or say: no.",
        _NONE,
        "1417",
        gone,
    )


def _modes() -> Iterator[Case]:
    plan = [_value(_line("Plan mode"), "on, no file may be changed and no command may be run that changes anything")]
    offline = [_value(_line("Network access"), "forbidden")]
    frozen = [_value(_line("Staging is frozen"), "yes, nothing may be deployed there")]
    flag = [_value(_line("Feature flag"), "enabled")]
    yes_no = " Answer with yes or no first."
    yield Case("edit", "mode", "May you change src/app.py now?" + yes_no, r"^\W*no\b", r"^\W*yes", plan)
    yield Case("mode", "mode", "Is plan mode on or off?", r"\bon\b", r"\boff\b", plan)
    yield Case("download", "mode", "May you use the network now?" + yes_no, r"^\W*no\b", r"^\W*yes", offline)
    yield Case("deploy", "mode", "May something be deployed to staging now?" + yes_no, r"^\W*no\b", r"^\W*yes", frozen)
    yield Case("flag", "mode", "Is the feature flag fast_search enabled?" + yes_no, r"^\W*yes\b", r"^\W*no\b", flag)
    yield Case("back", "mode", "May you change src/app.py now?" + yes_no, r"^\W*yes\b", r"^\W*no\b", [], plan)


def _long_lines() -> Iterator[Case]:
    spaces = STYLE.replace("100 characters", "72 characters")
    quotes = STYLE.replace("double quotes", "single quotes")
    tabs = STYLE.replace("tabs are never used", "tabs are always used")
    width = "How many characters may a line have?"
    yield Case("width", "long line", width, "72", r"\b100\b", [(STYLE, spaces)])
    yield Case("quotes", "long line", "Which quotes do strings have?", r"single", r"double", [(STYLE, quotes)])
    yield Case("tabs", "long line", "Are tabs used? Say always or never.", r"always", r"never", [(STYLE, tabs)])
    yield Case("rest", "long line", "Which quotes do strings have?", r"double", r"single", [(STYLE, spaces)])
    yield Case(
        "gone",
        "long line",
        _STYLED,
        r"^\W*no\b",
        r"^\W*yes",
        [(STYLE, None)],
    )


def _tools() -> Iterator[Case]:
    yes_no = " Answer with yes or no first."
    without, search = TOOLS[:1] + TOOLS[2:], (*TOOLS, tool("search_web", "Search the web"))
    yield Case(
        "gone",
        "tools",
        "Do you have a tool with which you can delete a file?" + yes_no,
        r"^\W*no\b",
        r"^\W*yes",
        tools=without,
    )
    yield Case(
        "kept",
        "tools",
        "Do you have a tool with which you can read a file?" + yes_no,
        r"^\W*yes",
        r"^\W*no\b",
        tools=without,
    )
    yield Case("came", "tools", "What is the name of your tool for searching the web?", r"search_web", tools=search)
    yield Case("none", "tools", "Do you have a tool for sending mail?" + yes_no, r"^\W*no\b", r"^\W*yes", tools=search)


def _reminders() -> Iterator[Case]:
    first = "The developer's name is Maren. The to-do list is empty."
    named = "The developer's name is Tobias. The to-do list is empty."
    listed = "The developer's name is Maren. The to-do list has one entry: rename the module parser."
    who, what = "What is the developer's name?", "What is on the to-do list?"
    yield Case("name", "reminder", who, "Tobias", "Maren", reminder=(first, named))
    yield Case("list", "reminder", what, r"rename|parser", r"empty", reminder=(first, listed))
    yield Case("same", "reminder", who, "Maren", reminder=(first, listed))
    yield Case(
        "gone",
        "reminder",
        "Is the developer's name told to you now? Say it, or say: no.",
        _NONE,
        "Maren",
        reminder=(first, None),
    )
    yield Case("came", "reminder", who, "Tobias", reminder=(None, named))


def cases() -> list[Case]:
    """All of them; equal in every call."""
    kinds = (_changed, _changed_back, _withdrawn, _added, _several, _modes, _long_lines, _tools, _reminders)
    return [case for kind in kinds for case in kind()]
