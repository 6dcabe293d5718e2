"""Which tokens of a request are new: the benchmark's yardstick, the same for every server.

A request is laid out as *units*: what Hermes says about tools, a line per tool, then for each message its header, its
reasoning, its lines, its tool calls (name and sorted arguments) and its end, and last the generation prompt. A unit
costs what its text costs in the oracle's tokenizer. What was generated is laid out in the same way behind the request
that it answers. A request's new units are those that are in no common subsequence (difflib's) with what one earlier
request of the scenario carried or had generated. Candidates are the earlier requests whose first message shares a line
with this one's, or whose first answer is the same (what another conversation quotes is new); the one that leaves the
fewest new units is used. So a
changed clock line costs that line, a stripped reasoning costs nothing, an insertion costs what was inserted, a block
that moved costs itself.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

Json = dict[str, Any]
_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>", re.DOTALL)


TOOLS_PREAMBLE = """# Tools

You may call one or more functions to help with the task.

The functions, inside <tools></tools>:
<tools>
</tools>

For each call, answer with a JSON object inside <tool_call></tool_call>:
<tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>"""


def text_of(content: Any) -> str:
    """Content as text: a string, text parts, or nothing."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def call_unit(name: str, arguments: Any) -> str:
    """A tool call whatever way its arguments are written."""
    if isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, sort_keys=True) + "\n</tool_call>\n"


def assistant_units(content: str, reasoning: str, calls: Sequence[tuple[str, Any]]) -> list[str]:
    """An assistant turn without its header. Reasoning that stands in the content as well counts once."""
    if match := _THOUGHT.match(content):
        reasoning, content = match[1], content[match.end() :]
    units = [f"<think>\n{reasoning.strip()}\n</think>\n\n"] if reasoning.strip() else []
    units += [line + "\n" for line in content.strip().splitlines()]
    return [*units, *(call_unit(*call) for call in calls), "<|im_end|>\n"]


def request_units(messages: Sequence[Json], tools: Sequence[Json] = ()) -> list[str]:
    """A request's units, the generation prompt last."""
    units = [TOOLS_PREAMBLE, *sorted(json.dumps(tool, sort_keys=True) + "\n" for tool in tools)] if tools else []
    for message in messages:
        units.append(f"<|im_start|>{message['role']}\n")
        content = text_of(message.get("content"))
        if message["role"] == "assistant":
            functions = [call.get("function", call) for call in message.get("tool_calls") or []]
            calls = [(function["name"], function["arguments"]) for function in functions]
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            units += assistant_units(content, reasoning, calls)
        else:
            units += [line + "\n" for line in content.splitlines()]
            units.append("<|im_end|>\n")
    return [*units, "<|im_start|>assistant\n"]


@dataclass
class NewTokens:
    """Remembers the requests of one scenario. Use on one thread."""

    count: Callable[[str], int]
    held: list[list[str]] = field(default_factory=list)
    prices: dict[str, int] = field(default_factory=dict)

    def price(self, units: Sequence[str]) -> int:
        """Tokens of these units."""
        for unit in units:
            if unit not in self.prices:
                self.prices[unit] = self.count(unit)
        return sum(self.prices[unit] for unit in units)

    def new(self, units: list[str]) -> int:
        """Tokens of `units` that no earlier request carried or generated; at least 1: something must be computed."""
        best = self.price(units)
        wanted = Counter(units)
        bounded = []
        for old in self.held:
            if not _alike(units, old):
                continue
            common = wanted & Counter(old)
            bounded.append((best - self.price(list(common.elements())), old))
        for bound, old in sorted(bounded, key=lambda pair: pair[0]):
            if bound >= best:
                break
            best = min(best, self.price(_unmatched(units, old)))
        return max(1, best)

    def add(self, units: list[str], generated: list[str]) -> None:
        """Remembers a request and its answer (`assistant_units`)."""
        self.held.append([*units, *generated])


def _alike(units: Sequence[str], other: Sequence[str]) -> bool:
    """One of the first message's lines is the same, or the first answer is: the same is asked in another role."""
    first, others = (_message(each, "<|im_start|>") for each in (units, other))
    answer, before = (_message(each, "<|im_start|>assistant\n") for each in (units, other))
    return bool(set(first) & set(others)) or (len(answer) > 0 and answer == before)


def _message(units: Sequence[str], header: str) -> Sequence[str]:
    """The lines of the first message whose header begins so."""
    first = next((i for i, unit in enumerate(units) if unit.startswith(header)), len(units))
    end = next((i for i in range(first, len(units)) if units[i] == "<|im_end|>\n"), len(units))
    return units[first + 1 : end]


def _unmatched(units: list[str], old: list[str]) -> list[str]:
    head = 0
    while head < min(len(units), len(old)) and units[head] == old[head]:
        head += 1
    matcher = SequenceMatcher(None, old[head:], units[head:], autojunk=False)
    rest: list[str] = []
    for tag, _, _, start, stop in matcher.get_opcodes():
        if tag in {"insert", "replace"}:
            rest += units[head + start : head + stop]
    return rest
