"""Recorded agent sessions replayed token by token: how many tokens a forward pass yields when drafts are verified.

Nothing is computed by a model: what was said is known, so a draft is right exactly as far as it equals the recording.
A session is a JSON-lines file as the PI agent writes it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from start_llm.engine.decode.draft import Proposal, SuffixIndex
from start_llm.engine.decode.gate import MOST_DRAFTED, MOST_WIDE, DraftGate, DraftOption, PassCosts
from start_llm.prompt.drafts import tool_result_views

CallStyle = Literal["xml", "json"]
Encode = Callable[[str], list[int]]

# Relative cost of a forward pass by its width, as published for these machines.
MACHINES = {
    "M4 Pro": {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5},
    "M5 Max": {1: 1.0, 3: 1.12, 5: 1.42, 8: 2.2, 16: 3.9, 32: 3.9},
    "M1-like": {1: 1.0, 2: 1.83, 4: 3.26, 8: 6.1, 32: 6.4},
}


@dataclass(frozen=True)
class Turn:
    """One answer of a session.

    Attributes:
        before: tokens of the prompt since the last turn's answer.
        answer: tokens that the model said, the end of its turn included.
        views: token sequences of the tool results that are new in `before`, as they may come back in a call.
    """

    before: list[int]
    answer: list[int]
    views: list[list[int]]


@dataclass
class Totals:
    """What a replay counted."""

    said: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    widths: dict[int, int] = field(default_factory=dict)

    @property
    def per_forward(self) -> float:
        return self.said / max(1, self.forwards)

    def speed_up(self, costs: dict[int, float]) -> float:
        """Against one token a forward, on a machine with these relative costs by width."""
        return self.said * costs[1] / sum(count * cost_at(costs, width) for width, count in self.widths.items())

    def forward(self, width: int, drafted: int, accepted: int) -> None:
        """Adds a pass of so many tokens; it says one token more than it accepts."""
        self.forwards += 1
        self.drafted += drafted
        self.accepted += accepted
        self.widths[width] = self.widths.get(width, 0) + 1


def cost_at(costs: dict[int, float], width: int) -> float:
    """Between two known widths, on the straight line."""
    below = max((w for w in costs if w <= width), default=min(costs))
    above = min((w for w in costs if w >= width), default=max(costs))
    if below == above:
        return costs[below]
    return costs[below] + (costs[above] - costs[below]) * (width - below) / (above - below)


def turns(path: Path, encode: Encode, style: CallStyle) -> Iterator[Turn]:
    """The answers of a recorded session, in ChatML."""
    before: list[int] = []
    views: list[list[int]] = []
    for line in path.read_text().splitlines():
        message = json.loads(line).get("message")
        if message is None or not message["content"]:
            continue
        text = "".join(part.get("text", "") for part in message["content"])
        if message["role"] == "assistant":
            answer = encode(said(message["content"], style) + "<|im_end|>")
            yield Turn([*before, *encode("<|im_start|>assistant\n")], answer, views)
            before, views = encode("\n"), []
        elif message["role"] == "toolResult":
            before += encode(f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n")
            views += [encode(view) for view in tool_result_views(text, escaped=style == "json")]
        else:
            before += encode(f"<|im_start|>user\n{text}<|im_end|>\n")


def said(content: Sequence[dict[str, Any]], style: CallStyle) -> str:
    parts = [part["thinking"] for part in content if part["type"] == "thinking"]
    parts += [part["text"] for part in content if part["type"] == "text"]
    for part in content:
        if part["type"] == "toolCall":
            parts.append(_call(part["name"], part["arguments"], style))
    return "\n".join(parts)


def _call(name: str, arguments: dict[str, Any], style: CallStyle) -> str:
    if style == "json":
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    written = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{''.join(written)}</function>\n</tool_call>"


def drafted_behind(match: int) -> int:
    """Fixed lengths, behind a match of so many tokens."""
    return 31 if match >= 16 else 3


class Fixed:
    """Drafts of three tokens, or 31 behind a match of 16."""

    def length(self, proposal: Proposal, carried: int, context: int) -> int:
        return min(len(proposal.tokens), drafted_behind(proposal.match))

    def saw(self, match: int, right: bool) -> None:
        pass

    def passed(self, width: int, context: int) -> None:
        pass


class Published(PassCosts):
    """Costs of a pass that are known and stay as they are.

    Args:
        costs: seconds by width; between two widths on the straight line.
    """

    wants_narrow = False

    def __init__(self, costs: dict[int, float]) -> None:
        self._costs = [cost_at(costs, max(1, width)) for width in range(MOST_WIDE + 1)]

    def by_width(self, context: int) -> list[float]:
        return self._costs

    def observe(self, width: int, context: int, seconds: float) -> None:
        pass


class OraclePasses(Published):
    """`passes`: seconds of a pass in all, for each token in it, each in the KV, each pair of both (`ORACLE_PASS`)."""

    def __init__(self, passes: str) -> None:
        self._first, self._token, self._held, self._pair = map(float, passes.split())

    def by_width(self, context: int) -> list[float]:
        first, token = self._first + self._held * context, self._token + self._pair * context
        return [first + token * max(1, width) for width in range(MOST_WIDE + 1)]


class Gated:
    """Drafts as long as the server's gate would let them be, on a machine with these costs.

    Args:
        noise: of the clock by which the gate learns them, as a share; ``None``: it knows them.
    """

    def __init__(self, costs: dict[int, float] | Published, carries: bool, noise: float | None = None) -> None:
        self._costs = costs if isinstance(costs, Published) else Published(costs)
        self._noise, self._chance = noise or 0.0, random.Random(1)
        self._gate = DraftGate(self._costs if noise is None else PassCosts(), carries)

    def length(self, proposal: Proposal, carried: int, context: int) -> int:
        option = DraftOption(proposal.match, len(proposal.tokens))
        return self._gate.choose([option], carried=carried, context=context)[1]

    def saw(self, match: int, right: bool) -> None:
        self._gate.acceptance.observe(match, right)

    def passed(self, width: int, context: int) -> None:
        self._gate.observe(width, context, self._seconds(width, context))

    def _seconds(self, width: int, context: int) -> float:
        """As the clock says it."""
        costs = self._costs.by_width(context)
        return costs[min(width, len(costs) - 1)] * max(0.5, self._chance.gauss(1, self._noise))


def replay(
    session: Sequence[Turn], policy: Fixed | Gated, *, carry: bool = False, views: bool = True, first: int = 0
) -> Totals:
    """Plays a session.

    Args:
        first: so many answers are only there, as if another server had said them.
        policy: how long drafts are.
        carry: the model's state cannot be cut: after a rejection what was accepted goes into the next pass again.
        views: proposals come from views of the tool results, too.
    """
    totals, history, seen = Totals(), list[int](), list[list[int]]()
    for number, turn in enumerate(session):
        history += turn.before
        seen += turn.views if views else []
        if number >= first:
            _play(turn.answer, SuffixIndex(history, seen), policy, carry, totals)
            totals.said += len(turn.answer)
        history += turn.answer
    return totals


def _play(answer: list[int], index: SuffixIndex, policy: Fixed | Gated, carry: bool, totals: Totals) -> None:
    """One answer. Its first token comes from the prefill; its last one is computed, too, to be in the KV."""
    carried, at = 0, 0
    while at < len(answer):
        index.append([answer[at]])
        at += 1
        draft: list[int] = []
        proposal = index.propose(min(MOST_DRAFTED, len(answer) - at)) if at < len(answer) else None
        if proposal is not None:
            draft = proposal.tokens[: policy.length(proposal, carried, index.known)]
        accepted = next((i for i, token in enumerate(draft) if token != answer[at + i]), len(draft))
        if proposal is not None:
            for i in range(min(accepted + 1, max(1, len(draft)))):
                policy.saw(proposal.match + i, proposal.tokens[i] == answer[at + i])
        totals.forward(carried + 1 + len(draft), len(draft), accepted)
        policy.passed(carried + 1 + len(draft), index.known)
        carried = carried + 1 + accepted if carry and accepted < len(draft) else 0
        index.append(answer[at : at + accepted])
        at += accepted
