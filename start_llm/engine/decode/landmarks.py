"""Where in an answer clients are likely to part from it. Model thread only. Knows tokens, not texts.

A client sends an answer back as it has read it: it may drop the reasoning, and write a call down in another way. Layers
that cannot be cut go on only from a state that was kept, so a row keeps its state at such places.

Some of them the model's format tells: the *marks*, tokens that end reasoning or that begin a call. The others are
learnt. Where a request of the same owner parted from an answer a few tokens behind a mark, the tokens from the mark to
there are a *lead*, as ``<tool_call>{"name": "Bash", "arguments": {"command": "`` of a client that shortens commands.
The end of a lead is a landmark of the answers that come after.
"""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.kvcache.blocks import TokenSequence

LONGEST_LEAD = 32  # tokens
_SHORTEST_LEAD = 8  # a shorter one is computed again
_MOST_LEADS = 32  # of one owner


class Landmarks:
    """Of one owner: what others' clients do must not be seen in what this one's requests cost."""

    def __init__(self, marks: frozenset[int] = frozenset()) -> None:
        self.marks = marks
        self._leads: dict[tuple[int, ...], None] = {}  # those that were used last stand last
        self._ends = frozenset[int]()  # last tokens of leads

    def learn(self, tokens: TokenSequence) -> None:
        """A request parted behind these tokens from what was stored, and no state was kept there."""
        nearby = tuple(int(token) for token in tokens[-LONGEST_LEAD:])
        start = next((i for i in reversed(range(len(nearby))) if nearby[i] in self.marks), None)
        if start is None or len(nearby) - start < _SHORTEST_LEAD:
            return
        self._leads.pop(nearby[start:], None)
        self._leads[nearby[start:]] = None
        if len(self._leads) > _MOST_LEADS:
            del self._leads[next(iter(self._leads))]
        self._ends = frozenset(lead[-1] for lead in self._leads)

    def at_end(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens ends a landmark."""
        if tokens[-1] in self.marks:
            return True
        if tokens[-1] not in self._ends:
            return False
        lead = next((lead for lead in self._leads if tuple(tokens[-len(lead) :]) == lead), None)
        if lead is not None:
            del self._leads[lead]
            self._leads[lead] = None
        return lead is not None

    def first(self, before: Sequence[int], draft: Sequence[int]) -> int | None:
        """The index of the first token of `draft` that ends a landmark; `before`: what stands in front of it."""
        possible = (i for i, token in enumerate(draft) if token in self.marks or token in self._ends)
        tail = list(before[-LONGEST_LEAD:])
        return next((i for i in possible if self.at_end([*tail, *draft[: i + 1]])), None)
