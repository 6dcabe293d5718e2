"""What becomes of a request on its way through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from start_llm.core.prompt import Prompt
from start_llm.prompt.canonical import ROOT
from start_llm.prompt.clock import Clock
from start_llm.prompt.render import Rendered
from start_llm.prompt.tokenise import Coded
from start_llm.prompt.turns import Record
from start_llm.prompt.view import Entry, View


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
