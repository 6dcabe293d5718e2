"""Reads prompts of `test_belongs`, and renders requests by the template alone. Shares no code with the server.

Prompts are those of the templates ``chatml`` and ``qwen35`` in `tests.prompt.models`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from start_llm.core.messages import Message, Tool
from tests.prompt.belongs_clients import FILES_REPLY, SYSTEM, TOOLS
from tests.prompt.models import TEMPLATES, fast_tokenizer

START = re.compile(r"(?=<\|im_start\|>)")
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n?(.*?)<\|im_end\|>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TAG = re.compile(r"<([A-Za-z][\w:.-]*)([^<>\n]*)>")
_TEMPLATE_TAGS = {"<think>", "<tools>", "<tool_call>", "<tool_response>", "<system-message>"}
_GONE = re.compile(
    r"\b(no longer|no more|any ?more|gone|removed?|withdr[ae]wn?|dropped|deleted|ended|left out|taken (?:out|back|away)"
    r"|does not hold|not valid|without)\b",
    re.IGNORECASE,
)
_HOLDS = re.compile(r"(\bnow\b|\bnew\b|\binstead\b|->|→|=>)", re.IGNORECASE)
# Lines that speak of all tools, or of all of the system text.
_OF_ALL = {TOOLS: re.compile(r"\b(no|all) tools?\b", re.IGNORECASE), SYSTEM: re.compile(r"system text at the top")}
_AGAIN = re.compile(r"\bagain\b")
_LEFT_OUT = re.compile(r"^-(.*)\n\(-(\d+) more lines, down to\)\n-(.*)$", re.MULTILINE)


def count(text: str) -> int:
    """Tokens of a text. A special token parts it, so that equal parts are counted once."""
    return sum(map(_count, START.split(text)))


@lru_cache(maxsize=50_000)
def _count(part: str) -> int:
    # Of a batch no places in the text are kept, which takes as long as the tokens.
    return len(fast_tokenizer().backend_tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids)


def tags(texts: Iterable[str]) -> set[str]:
    return {match[0] for text in texts for match in _TAG.finditer(text)}


def texts_of(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """All that a client says in a request."""
    for message in messages:
        yield message.content
        yield message.reasoning or ""
        yield message.tool_call_id or ""
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    for tool in tools:
        yield from (tool.name, tool.description)


# --- the template's rendering -----------------------------------------------------


def rendering(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    family: str,
    thinking: bool,
    *,
    parsed: bool = True,
    inline: bool = True,
) -> str:
    """The template applied to the messages.

    parsed: arguments of calls as objects, else as the client's strings. inline: reasoning stands in the content where
    the template knows no other place for it.
    """
    knows = "reasoning_content" in TEMPLATES[family]
    dicts = [_as_dict(message, parsed, inline and not knows) for message in messages]
    text = fast_tokenizer().apply_chat_template(
        dicts,
        tools=[_function(tool) for tool in tools] or None,
        chat_template=TEMPLATES[family],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=thinking,
        preserve_thinking=True,
    )
    return str(text)


def renderings(messages: Sequence[Message], tools: Sequence[Tool], family: str, thinking: bool) -> Iterator[str]:
    """All that can be called the template's rendering of these messages."""
    for parsed in (True, False):
        for inline in (True, False):
            yield rendering(messages, tools, family, thinking, parsed=parsed, inline=inline)


def _as_dict(message: Message, parsed: bool, inline: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        if inline:
            result["content"] = f"<think>\n{message.reasoning.strip()}\n</think>\n\n{message.content.lstrip()}"
        else:
            result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}
            for call in message.tool_calls
            for arguments in (json.loads(call.arguments) if parsed else call.arguments,)
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _function(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


# --- what a prompt says -----------------------------------------------------------


class Shown(NamedTuple):
    """A message as a model reads it."""

    role: str
    body: str


def messages_read(prompt: str) -> list[Shown]:
    """The messages of a prompt, tool results one by one; aider's files and the reply to them are left out."""
    found: list[Shown] = []
    for role, body in _MESSAGE.findall(prompt):
        results = _RESULT.findall(body) if role == "user" and body.lstrip().startswith("<tool_response>") else []
        if results:
            found += [Shown("tool", result) for result in results]
        elif role == "assistant" and body.endswith(FILES_REPLY):
            found.pop()
        else:
            found.append(Shown(role, body))
    return found


@dataclass(frozen=True)
class Frame:
    """A note: something in a tag that no client has ever sent."""

    start: int
    end: int


def without_notes(text: str, sent_tags: set[str]) -> str:
    for note in reversed(frames(text, sent_tags)):
        text = text[: note.start].rstrip("\n") + text[note.end :]
    return text


def frames(prompt: str, sent_tags: set[str]) -> list[Frame]:
    found: list[Frame] = []
    for match in _TAG.finditer(prompt):
        if match[0] in sent_tags or match[0] in _TEMPLATE_TAGS or (found and match.start() < found[-1].end):
            continue
        close = prompt.find(f"</{match[1].partition('-')[0]}", match.end())
        if close >= 0:
            found.append(Frame(match.start(), prompt.find(">", close) + 1))
    return found


class Mention(NamedTuple):
    """Where a prompt says something; `gone`: it says that it is no longer so."""

    at: int
    gone: bool


def last_mention(
    prompt: str, value: str, notes: Sequence[Frame], name: str | None = None, where: int = 0
) -> Mention | None:
    """The last place that speaks of `value`, or in a note of the thing called `name` (a pattern), or of all `where`."""
    found = [Mention(match.start(), False) for match in re.finditer(re.escape(value) + r"(?![a-z0-9])", prompt)]
    words = [re.escape(value), *([name] if name is not None else [])]
    for note in notes:
        found = [mention for mention in found if not note.start <= mention.at < note.end]
        found += _in_note(prompt[note.start : note.end], note.start, words)
        found += _of_all(prompt, note, value, where)
        found += _in_between(prompt, note, value)
    return max(found, default=None)


def _of_all(prompt: str, note: Frame, value: str, where: int) -> Iterator[Mention]:
    """What is at the top holds again, or nothing of it does."""
    pattern = _OF_ALL.get(where)
    at = note.start
    for line in prompt[note.start : note.end].split("\n"):
        if pattern is not None and pattern.search(line):
            yield Mention(at, not (_AGAIN.search(line) and value in prompt[: prompt.find("<|im_end|>")]))
        at += len(line) + 1


def _in_between(prompt: str, note: Frame, value: str) -> Iterator[Mention]:
    """Of many lines that are gone only the first and the last are told; those between them stand further up."""
    for match in _LEFT_OUT.finditer(prompt, note.start, note.end):
        first, last = (re.escape(line.partition(" (not")[0].removesuffix(" ...")) for line in (match[1], match[3]))
        gone = re.compile(rf"^\+?{first}.*(?:\n.*){{{int(match[2])}}}\n\+?{last}", re.MULTILINE)
        for lines in gone.finditer(prompt, 0, note.start):
            if re.search(re.escape(value) + r"(?![a-z0-9])", lines[0]):
                yield Mention(match.start(), True)


def _in_note(note: str, offset: int, words: Sequence[str]) -> Iterator[Mention]:
    heading_gone = False
    at = offset
    for line in note.split("\n"):
        stripped = line.strip()
        gone = _GONE.search(line)
        if stripped.endswith(":"):
            heading_gone = gone is not None and not _HOLDS.search(line, gone.end())
        elif line.startswith(("Tool ", "Available again")):
            heading_gone = False
        for word in words:
            for match in re.finditer(word + r"(?![a-z0-9])", line):
                said_gone = heading_gone or gone is not None or stripped.startswith("-")
                holds = gone is not None and _HOLDS.search(line, gone.end(), match.start()) if gone else None
                yield Mention(at + match.start(), said_gone and not holds)
        at += len(line) + 1
