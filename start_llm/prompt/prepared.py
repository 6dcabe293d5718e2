"""What becomes of a request on its way through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from start_llm.core.prompt import Prompt
from start_llm.prompt.canonical import ROOT
from start_llm.prompt.clock import Clock
from start_llm.prompt.render import Rendered
from start_llm.prompt.tokenise import Coded
from start_llm.prompt.turns import Generation, Open, Record
from start_llm.prompt.view import Entry, View


def next_generation(
    base: tuple[int, Record, int] | None, keys: Sequence[bytes | None]
) -> tuple[Open, Generation] | None:
    """What the model of `base` answered behind the messages that it shares, if that is the request's next message.

    `keys`: the identity of each message of the request's chain if it is an assistant turn.
    """
    if base is None or base[2] >= len(keys):
        return None
    _, record, depth = base
    return record.generation(depth, keys[depth])


class Match(NamedTuple):
    """A request's messages, and the record that they go on from."""

    entries: list[Entry]
    chain: tuple[bytes, ...]
    keys: list[bytes | None]
    base: tuple[int, Record, int] | None
    strict: bool

    @property
    def depth(self) -> int:
        """Messages of the chain that are shown as they were before."""
        return self.base[2] if self.base is not None else 0

    @property
    def generation(self) -> tuple[Open, Generation] | None:
        """What the record's model answered there, if that is the request's next message."""
        return next_generation(self.base, self.keys)


@dataclass(frozen=True)
class Prepared:
    """A request ready for the engine.

    Attributes:
        prompt: what the model gets.
        in_reasoning: the generation prompt has opened the reasoning block.
        fresh: prompt tokens from the first message that no earlier request carried to the end.
        session: stable id of the conversation: the client's own, else derived from how it begins.
        one_shot: looks like a side request (title, summary).
        notes: lines of the update note that was added.
    """

    prompt: Prompt
    in_reasoning: bool
    fresh: int
    session: str
    one_shot: bool = False
    notes: tuple[str, ...] = ()
    turn: Turn | None = field(default=None, repr=False)

    @property
    def served(self) -> int:
        """Tokens at its front that an earlier turn had as well, its answer included."""
        return self.turn.coded.taken if self.turn is not None else 0


@dataclass(frozen=True)
class Turn:
    """What the pipeline's later steps need of a prepared request."""

    entries: tuple[Entry, ...]
    view: View
    chain: tuple[bytes, ...]
    keys: tuple[bytes | None, ...]
    variables: dict[str, Any]
    rendered: Rendered
    coded: Coded
    base: tuple[int, Record, int] | None
    clock: Clock | None = None
    healed: int = 0

    @property
    def parent(self) -> bytes:
        return self.chain[-1] if self.chain else ROOT
