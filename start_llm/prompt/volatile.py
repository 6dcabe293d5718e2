"""The table of volatile fields: what changes from request to request though nothing was said.

A rule finds a field in a message's text, a line or a block of lines at a time. Its *kind* says what becomes of it:

| kind | canonical form | prompt under the ``append`` policy |
|---|---|---|
| telemetry | nothing | left out |
| clock, identity | a stable marker | the first value stays, a note tells the new one |
| context | nothing | the first text stays, a note tells what changed, came or went |
| reminder | nothing | stays where it was seen; a new text comes where the client put it |
| transient | nothing (the whole message) | shown where the client puts it, gone the next time |
| moving | nothing | where the client moves it to, it is left out if it was shown; a note tells what changed in it |

A ``moving`` or ``reminder`` block that takes a whole message may have a reply, an assistant message right behind it
that goes with it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from start_llm.core.messages import Message

Kind = Literal["telemetry", "clock", "identity", "context", "reminder", "transient", "moving"]
KINDS: tuple[str, ...] = get_args(Kind)
ROLES = ("system", "user", "tool")
MAX_BLOCK_LINES = 2000
_VANISHING = {"telemetry", "context", "reminder", "transient", "moving"}


class RuleError(ValueError):
    """A bad rule in CACHE_RULES_FILE. The message names the file and the rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One volatile field.

    Attributes:
        pattern: matches within one line. With a group named ``value`` only that group is volatile.
        end: the block runs from the match of `pattern` to the match of `end`, on the same or a later line.
            A block of the kind ``moving``, or with a `reply`, runs to the end of the message without it.
        tail: lines that directly follow the block and match this belong to it.
        reply: the whole text of the assistant message that the client puts behind the block.
        where: roles of the messages it applies to.
        marker: stands for the field in the canonical form.
    """

    name: str
    kind: Kind
    where: frozenset[str]
    pattern: re.Pattern[str]
    end: re.Pattern[str] | None = None
    tail: re.Pattern[str] | None = None
    marker: str = ""
    reply: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A volatile field found in a text: characters `start` to `end`, and the whole `line`s it stands in."""

    rule: Rule
    start: int
    end: int
    text: str
    line: str


def _rule(
    name: str,
    kind: Kind,
    where: str,
    pattern: str,
    *,
    end: str | None = None,
    tail: str | None = None,
    marker: str = "",
    reply: str | None = None,
) -> Rule:
    if not marker and kind not in _VANISHING:
        marker = f"<|{name}|>"
    closing, trailing, answer = (
        None if part is None else re.compile(part, re.MULTILINE) for part in (end, tail, reply)
    )
    return Rule(
        name, kind, frozenset(where.split()), re.compile(pattern, re.MULTILINE), closing, trailing, marker, answer
    )


BUILT_IN = (
    _rule(
        "openclaw_internal_context",
        "transient",
        "user system",
        r"^<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
        end=r"<<<END_OPENCLAW_INTERNAL_CONTEXT>>>[ \t]*$",
    ),
    _rule(
        "qwen_startup_context",
        "context",
        "system user",
        r"^This is the Qwen Code\. We are setting up the context\b.*$",
        end=r"^</system-reminder>",
    ),
    _rule(
        "qwen_current_date",
        "moving",
        "user",
        r"<system-reminder>\nThe current date is: .*\bauthoritative\b.*$",
        end=r"^</system-reminder>",
    ),
    _rule(
        "qwen_git_snapshot",
        "context",
        "system user",
        r"^Git snapshot at conversation start\b.*$",
        end=r"^```[ \t]*$",
    ),
    _rule(
        "aider_files",
        "moving",
        "user",
        r"^(?:I have|These files have been) \*added these files to the chat\*.*$"
        r"|^I am not sharing (?:any files that you can edit yet|the full contents of any files with you yet)\.$",
        reply=r"Ok\.|Ok, any changes I propose will be to those files\."
        r"|Ok, I will use that as the true, current contents of the files\.",
    ),
    _rule(
        "aider_read_only_files",
        "moving",
        "user",
        r"^Here are some READ ONLY files, provided for your reference\.$",
        reply=r"Ok, I will use these files as references\.",
    ),
    _rule(
        "aider_repo_map",
        "moving",
        "user",
        r"^Here are summaries of some (?:other )?files present in my git repository\.$"
        r"|^I am working with you on code in a git repository\.$",
        reply=r"Ok, I won't try and edit those files without asking first\.",
    ),
    _rule(
        "aider_edit_rules",
        "moving",
        "user",
        r"^# \*SEARCH/REPLACE block\* Rules:$|^# V4A Diff Format Rules:$|^# File editing rules:$"
        r"|^To suggest changes to a file you MUST return the entire content of the updated file\.$",
    ),
    _rule(
        "aider_outcome",
        "reminder",
        "user",
        # The conversation that aider restores from its file is without them.
        r"\AI committed the changes with git hash [0-9a-f]+ & commit msg: .*$|\AI updated the files\.\Z"
        r"|\AI edited the files myself\.\Z|\AI didn't see any properly formatted edits in your reply\?!\Z",
        reply=r"Ok\.",
    ),
    _rule("system_reminder", "reminder", "system user tool", r"<system-reminder>", end=r"</system-reminder>"),
    _rule("billing_header", "telemetry", "system user", r"^[ \t]*x-anthropic-billing-header:.*$"),
    _rule(
        "inbound_context",
        "context",
        "system user",
        r"^#{1,3} Inbound Context\b.*$|^(?:Conversation info|Sender|Chat history since last reply)"
        r" \(untrusted[^\n)]*\):[ \t]*$",
        end=r"^```[ \t]*$",
    ),
    _rule(
        "git_status",
        "context",
        "system user",
        r"^(?:gitStatus: ?)?This is the git status at the start of the conversation\b.*$",
        end=r"^Recent commits:.*$",
        tail=r"^[0-9a-f]{7,40} .*$",
    ),
    _rule(
        "subagent_stats",
        "context",
        "system user tool",
        r"^[ \t]*Stats: (?P<value>runtime\b.*)$",
        marker="<|subagent_stats|>",
    ),
    _rule("runtime_line", "identity", "system user", r"^Runtime: (?P<value>\S.*)$"),
    _rule("current_time", "clock", "system user", r"\b[Cc]urrent time(?: is:?|:) ?(?P<value>\S.*)$"),
    _rule("current_date", "clock", "system user", r"^[ \t]*Current date(?: is:?|:) ?(?P<value>\S.*)$"),
    _rule("todays_date", "clock", "system user", r"\b[Tt]oday(?:'s|’s) date(?: is:?|:) ?(?P<value>\S.*)$"),
    _rule(
        "message_id",
        "identity",
        "system user",
        r"(?:\[message_id: ?|\"message_id\": ?\"|^[ \t]*message_id: ?)(?P<value>[^\]\"\s]+)",
    ),
    _rule(
        "conversation_id",
        "identity",
        "system user",
        r"(?:\[|\"|\b)(?:conversation|session|thread|run)_?[iI]d(?:\")?[:=] ?\"?(?P<value>[\w.:@-]{6,})",
    ),
)


def _lines_from(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Starts and ends (line break excluded) of the lines of `text` that begin at or after `position`."""
    while position < len(text):
        stop = text.find("\n", position)
        stop = len(text) if stop < 0 else stop
        yield position, stop
        position = stop + 1


def _block_end(rule: Rule, text: str, opened: int) -> int | None:
    """Where the block that opened before `opened` ends, or None if it does not end within the limit."""
    assert rule.end is not None
    line_end = text.find("\n", opened)
    first = rule.end.search(text, opened, len(text) if line_end < 0 else line_end)
    if first is not None:
        end = first.end()
    else:
        if line_end < 0:
            return None
        for number, (start, stop) in enumerate(_lines_from(text, line_end + 1)):
            found = rule.end.search(text, start, stop)
            if found is not None:
                end = found.end()
                break
            if number >= MAX_BLOCK_LINES:
                return None
        else:
            return None
    if rule.tail is not None:
        for start, stop in _lines_from(text, end + 1):
            if rule.tail.match(text, start, stop) is None:
                break
            end = stop
    return end


def _whole_lines(text: str, start: int, end: int) -> str:
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    return text[first : len(text) if last < 0 else last].strip()


def _candidates(rule: Rule, text: str) -> Iterator[tuple[int, int]]:
    position = 0
    while (match := rule.pattern.search(text, position)) is not None:
        position = max(match.end(), match.start() + 1)
        if rule.end is not None:
            if rule.end.search(text, match.end()) is None:
                return  # nothing closes this block, nor any later one
            end = _block_end(rule, text, match.end())
            if end is None:
                continue
            yield match.start(), end
            position = max(position, end)
        elif rule.kind == "moving" or rule.reply is not None:
            yield match.start(), len(text)
            return
        elif "value" in rule.pattern.groupindex:
            yield match.span("value")
        else:
            yield match.span()


@dataclass(frozen=True, slots=True)
class Rules:
    """The table, in order; an earlier rule's field hides later ones inside it."""

    rules: tuple[Rule, ...] = BUILT_IN

    @staticmethod
    def load(path: Path | None) -> Rules:
        """The built-in rules and those of a TOML file (``[[rule]]`` tables), which come first and may replace by name.

        Raises:
            RuleError: naming the file and the rule.
        """
        if path is None:
            return Rules()
        try:
            data = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RuleError(f"{path}: cannot be read: {error}") from None
        tables = data.get("rule")
        if set(data) != {"rule"} or not isinstance(tables, list):
            raise RuleError(f"{path}: only [[rule]] tables are allowed at the top, found {sorted(data)}")
        own = tuple(_parse(table, f"{path}: rule {number}") for number, table in enumerate(tables, 1))
        names = [rule.name for rule in own]
        for name in names:
            if names.count(name) > 1:
                raise RuleError(f"{path}: rule {name!r}: the name is used twice")
        return Rules(own + tuple(rule for rule in BUILT_IN if rule.name not in names))

    def find(self, message: Message) -> tuple[Field, ...]:
        """Volatile fields of a message's text, in order, never overlapping."""
        if message.role == "assistant" or not message.content:
            return ()
        text = message.content
        found: list[Field] = []
        for rule in self.rules:
            if message.role not in rule.where:
                continue
            for start, end in _candidates(rule, text):
                if start < end and all(end <= field.start or start >= field.end for field in found):
                    found.append(Field(rule, start, end, text[start:end], _whole_lines(text, start, end)))
        found.sort(key=lambda field: field.start)
        return tuple(found)


_KEYS = {"name", "kind", "where", "pattern", "end", "tail", "marker", "reply"}


def _parse(table: Any, where: str) -> Rule:
    if not isinstance(table, dict):
        raise RuleError(f"{where}: must be a table")
    name = table.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise RuleError(f"{where}: name={name!r}: must be a word of letters, digits, _ and -")
    where = f"{where} ({name})"
    if unknown := sorted(set(table) - _KEYS):
        raise RuleError(f"{where}: unknown key {unknown[0]!r}; allowed are {', '.join(sorted(_KEYS))}")
    kind = table.get("kind")
    if kind not in KINDS:
        raise RuleError(f"{where}: kind={kind!r}: must be one of {', '.join(KINDS)}")
    roles = table.get("where", list(ROLES))
    if not isinstance(roles, list) or not roles or any(role not in ROLES for role in roles):
        raise RuleError(f"{where}: where={roles!r}: must be a list of {', '.join(ROLES)}")
    parts: dict[str, str | None] = {}
    for key in ("pattern", "end", "tail", "reply"):
        value = table.get(key)
        if value is None and key != "pattern":
            parts[key] = None
            continue
        if not isinstance(value, str) or not value:
            raise RuleError(f"{where}: {key}={value!r}: must be a regular expression")
        if "\n" in value or "\\n" in value or "(?s" in value:
            raise RuleError(f"{where}: {key}={value!r}: must match within one line; use end for a block")
        try:
            re.compile(value)
        except re.error as error:
            raise RuleError(f"{where}: {key}={value!r}: {error}") from None
        parts[key] = value
    marker = table.get("marker", "")
    if not isinstance(marker, str):
        raise RuleError(f"{where}: marker={marker!r}: must be text")
    if parts["tail"] is not None and parts["end"] is None:
        raise RuleError(f"{where}: tail needs end")
    if parts["reply"] is not None and kind not in ("moving", "reminder"):
        raise RuleError(f"{where}: reply is for the kinds moving and reminder")
    if marker and kind == "moving":
        raise RuleError(f"{where}: marker={marker!r}: the kind moving has none")
    pattern = parts["pattern"]
    assert pattern is not None
    if re.compile(pattern).match("") is not None:
        raise RuleError(f"{where}: pattern={pattern!r}: matches the empty line")
    return _rule(
        name, kind, " ".join(roles), pattern, end=parts["end"], tail=parts["tail"], marker=marker, reply=parts["reply"]
    )
