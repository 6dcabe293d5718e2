"""A request on its way: what the steps found out, and what the engine gets of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.core.request import ChatRequest
from start_llm.core.vision import ImageSpan
from start_llm.prompt.clock import Clock
from start_llm.prompt.ports import Tokenizer
from start_llm.prompt.reading import ROOT, MessageChain, answer_digest, link
from start_llm.prompt.render import Rendered
from start_llm.prompt.tokenise import Coded, boundaries
from start_llm.prompt.tree import ConversationTree, Path, Rendering
from start_llm.prompt.view import View


@dataclass(frozen=True)
class Turn:
    """What the later steps need of a prepared request.

    `stem`: the path whose text and tokens it goes on from. `spoken`: tokens of the answers of ours that it carries.
    """

    request: ChatRequest
    reading: MessageChain
    view: View
    variables: dict[str, Any]
    rendered: Rendered
    coded: Coded
    clock: Clock | None
    stem: Path | None
    spoken: int = 0
    images: tuple[ImageSpan, ...] = ()

    @property
    def key(self) -> bytes:
        return self.reading.keys[-1] if self.reading.keys else ROOT

    @property
    def rendering(self) -> Rendering:
        return Rendering(self.rendered.text, self.coded.tokens, self.coded.anchors, self.rendered.generation)

    def key_behind(self, answer: Message) -> bytes:
        return link(self.key, answer_digest(answer.content, answer.tool_calls))


@dataclass(frozen=True)
class Prepared:
    """A request ready for the engine.

    Attributes:
        prompt: what the model gets.
        in_reasoning: the generation prompt has opened the reasoning block.
        fresh: prompt tokens that this conversation had not seen before.
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


def prompt_of(turn: Turn, tokenizer: Tokenizer) -> Prompt:
    """The tokens, and the places in them that the engine keeps checkpoints at."""
    coded, rendered = turn.coded, turn.rendered
    length = len(coded.tokens)
    return Prompt(
        tokens=coded.tokens,
        boundaries=boundaries(coded.anchors, length),
        head=coded.token_at(rendered.head) if rendered.head else 0,
        transient=_transient_offset(turn) if turn.view.transient else None,
        generation=_generation_offset(turn, tokenizer),
        images=turn.images,
    )


def _generation_offset(turn: Turn, tokenizer: Tokenizer) -> int:
    """Token offset of the generation prompt; nearly always a special token stands there."""
    coded, rendered = turn.coded, turn.rendered
    place = coded.anchor_at(rendered.generation)
    if place is not None:
        return place
    return max(0, len(coded.tokens) - len(tokenizer.encode(rendered.text[rendered.generation :])))


def _transient_offset(turn: Turn) -> int | None:
    """Where the last message begins; None in a template that gives it no beginning of its own."""
    message = turn.view.new[-1].message.content.strip()
    for anchor in reversed(turn.coded.anchors):
        if anchor.start and anchor.char < turn.rendered.generation:
            alone = turn.rendered.generation - anchor.char < len(message) + 100
            return anchor.token if alone and anchor.token else None
    return None


def fresh_tokens(turn: Turn, tree: ConversationTree) -> int:
    """Tokens behind what the base had, less the share of messages that were said before (behind an insertion)."""
    coded, view = turn.coded, turn.view
    rest = len(coded.tokens) - coded.taken
    if view.base is None or all(shown.message.role != "assistant" for shown in view.new):
        return rest
    below = tree.said_below(view.base.node)
    entries = turn.reading.entries
    chars = [(shown.place, _size(shown.message)) for shown in view.new]
    known = [
        size
        for place, size in chars
        if place is not None and entries[turn.reading.indices[place]].facts.digest in below
    ]
    return rest - rest * sum(known) // max(1, sum(size for _, size in chars))


def _size(message: Message) -> int:
    """Roughly the characters that a template makes of a message."""
    calls = sum(len(call.name) + len(call.arguments) + 40 for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls + 40
