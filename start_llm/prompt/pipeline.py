"""One request's way from messages to tokens. The page to read first in this room.

read -> find the base -> decide what is shown -> render -> tokenise; afterwards: record, predict. The conversation tree
(`tree`) is the one memory; `docs/prompt.md` tells the walk with an example.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from start_llm.core.errors import BadRequest, ContextLengthExceeded
from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.core.vision import ImageSpan
from start_llm.prompt.clients import Clients
from start_llm.prompt.clock import OWN_DATES, VARIABLE, Clock
from start_llm.prompt.counters import Counters
from start_llm.prompt.length import LengthCheck
from start_llm.prompt.locate import Where, locate
from start_llm.prompt.match import Asked, bases
from start_llm.prompt.ports import Eyes, Template, Tokenizer
from start_llm.prompt.predict import Guesses, followers, known_until
from start_llm.prompt.probe import probe
from start_llm.prompt.reading import ROOT, Reader, Reading, answer_digest, call_id, link
from start_llm.prompt.render import Rendered, Renderer
from start_llm.prompt.sights import Sights
from start_llm.prompt.tokenise import Coded, Coder, boundaries
from start_llm.prompt.tree import Node, Path, Rendering, Tree, extended, grown
from start_llm.prompt.turndb import TurnDB
from start_llm.prompt.view import View, as_sent, going_on, strictly

log = logging.getLogger(__name__)

_WAIT_SECONDS = 2.0
_ANSWER_SHARE = 8  # an answer gets at least this part of the context before text is shown that the client did not send


@dataclass(frozen=True)
class Turn:
    """What the later steps need of a prepared request.

    `stem`: the path whose text and tokens it goes on from. `spoken`: tokens of the answers of ours that it carries.
    """

    request: ChatRequest
    reading: Reading
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


class Pipeline:
    """Turns requests into prompts and remembers what was shown. All methods may be called from any thread."""

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        *,
        settings: Settings,
        clients: Clients | None = None,
        store: TurnDB | None = None,
        now: Callable[[], datetime] = datetime.now,
        context: int = 0,
        eyes: Eyes | None = None,
    ) -> None:
        """Probes the template and reads what `store` holds for it; `close` closes the store.

        `now` tells the local time. `context`: tokens that a prompt and its answer may have, 0 if there is no limit.
        `eyes`: of a model that sees images.

        Raises:
            TemplateError: the template cannot render one user message.
        """
        self._strict = settings.cache_drift_policy == "strict" or not settings.cache_canonicalize_tool_context
        self._tokenizer = tokenizer
        self.traits = probe(template, tokenizer)
        self._renderer = Renderer(template, self.traits, preserve_thinking=settings.preserve_thinking)
        self._sights = Sights(eyes) if eyes is not None else None
        self._length = LengthCheck(tokenizer, context)
        self._coder = Coder(tokenizer, self.traits, self._sights, self._length)
        self._reader = Reader(Clients(()) if self._strict else clients or Clients())
        self._tree = Tree()
        self._awaited: dict[bytes, threading.Event] = {}
        self._guesses = Guesses()
        self._counters = Counters()
        self._now = now
        self._context = context
        self._store = store
        if store is not None:
            policy = "strict" if self._strict else "append"
            self._tree.restore(store.load(f"{self.traits.fingerprint}-{policy}"))

    # --- request ------------------------------------------------------------

    def prepare(self, request: ChatRequest, *, thinking: bool) -> Prepared:
        """Makes the prompt.

        Raises:
            BadRequest: no messages, or a conversation that the template refuses.
            ContextLengthExceeded: it is so long that not even its tokens are counted.
        """
        if request.prompt is not None:
            return self._completion(request)
        if not request.messages:
            raise BadRequest("messages is empty; at least one message is needed", param="messages")
        self._length.check([message.content for message in request.messages])
        variables = self._renderer.variables(
            thinking=thinking, effort=request.reasoning_effort, extra=request.template_kwargs
        )
        turn = self._turn(request, variables)
        return Prepared(
            prompt=self._prompt(turn),
            in_reasoning=turn.rendered.in_reasoning,
            fresh=self._fresh(turn),
            session=request.session or _session(turn.reading),
            one_shot=not request.tools and all(message.role != "assistant" for message in request.messages),
            notes=turn.view.notes,
            turn=turn,
        )

    def _completion(self, request: ChatRequest) -> Prepared:
        prompt = request.prompt
        assert prompt is not None
        if isinstance(prompt, str):
            self._length.check((prompt,))
        tokens = tuple(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        if not tokens:
            raise BadRequest("prompt is empty; at least one token is needed", param="prompt")
        session = request.session or "completion"
        return Prepared(Prompt(tokens, generation=len(tokens)), False, len(tokens), session, one_shot=True)

    def _turn(self, request: ChatRequest, variables: dict[str, Any]) -> Turn:
        """The first of these that fits the context: with what the client cleared or stripped, then as it was sent."""
        reading = self._reader.read(request.messages)
        self._await(reading)
        if self._strict:
            return self._strict_turn(request, reading, variables)
        if any(entry.cleared for entry in reading.entries):
            kept = self._reader.read(request.messages, self._tree.result_of)
            turn = self._based(request, kept, variables) if kept.keys != reading.keys else None
            if turn is not None and self._fits(turn, self._context // 2):
                return turn
        turn = self._based(request, reading, variables)
        if turn is not None and (not turn.view.extra or self._fits(turn, self._room(request))):
            return turn
        clock = self._clock(request, None)
        asked = Asked.of(request, reading, clock.value if clock is not None else None)
        return self._rendered(request, reading, as_sent(asked, self._tree.arrange(request.tools)), variables, clock)

    def _based(self, request: ChatRequest, reading: Reading, variables: dict[str, Any]) -> Turn | None:
        """The request as its conversation goes on; None if it goes on from no answer of this server."""
        clock = self._clock(request, None)
        asked = Asked.of(request, reading, clock.value if clock is not None else None)
        for match in bases(self._tree, asked):
            view = going_on(match, asked, self._count_tokens)
            if view is not None and self._at_hand(view, request):
                with suppress(ContextLengthExceeded):  # as it was sent it may be shorter
                    return self._rendered(request, reading, view, variables, self._clock(request, match.path))
        return None

    def _at_hand(self, view: View, request: ChatRequest) -> bool:
        """Every image of `view` came with the request: one that did not could not be computed."""
        sights = self._sights
        if sights is None:
            return True
        return not any(sights.unknown(message.content, request.pictures) for message in view.messages)

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _strict_turn(self, request: ChatRequest, reading: Reading, variables: dict[str, Any]) -> Turn:
        view = strictly(request.messages, request.tools)
        paths = (path for key in reversed(reading.keys) for path in self._tree.at(key))
        return self._rendered(request, reading, view, variables, None, stem=next(paths, None))

    def _fits(self, turn: Turn, limit: int) -> bool:
        return not self._context or len(turn.coded.tokens) <= limit

    def _room(self, request: ChatRequest) -> int:
        """Most tokens of a prompt that shows something which the client did not send."""
        answer = self._context // _ANSWER_SHARE
        return self._context - min(answer, request.max_tokens or answer)

    def _rendered(
        self,
        request: ChatRequest,
        reading: Reading,
        view: View,
        variables: dict[str, Any],
        clock: Clock | None,
        stem: Path | None = None,
    ) -> Turn:
        """`stem`: whose tokens may be taken where the text is the same, for a view without a base."""
        if clock is not None:
            variables = {**variables, VARIABLE: clock}
        rendered = self._renderer.render(view.messages, view.tools, variables)
        stem = view.base or stem
        coded = self._coder.code(rendered.text, stem, answered=view.base is not None)
        images = self._spans(request, rendered, coded)
        if images is None:  # the path's tokens were made by another processor
            coded = self._coder.code(rendered.text, None)
            images = self._spans(request, rendered, coded) or ()
        spoken = self._spoken(reading)
        return Turn(request, reading, view, variables, rendered, coded, clock, stem, spoken, images)

    def _spans(self, request: ChatRequest, rendered: Rendered, coded: Coded) -> tuple[ImageSpan, ...] | None:
        if self._sights is None:
            return ()
        return self._sights.spans(rendered.text, coded.tokens, request.pictures)

    def _spoken(self, reading: Reading) -> int:
        """Tokens that this server said on the way, whether or not the request goes on from them."""
        for key in reversed(reading.keys):
            if self._tree.has(key):
                return max((path.node.spoken for path in self._tree.at(key)), default=0)
        return 0

    def _clock(self, request: ChatRequest, path: Path | None) -> Clock | None:
        """The clock that the conversation began with, or the present one; None if the template prints no date."""
        if self._strict or not self.traits.dates or OWN_DATES & request.template_kwargs.keys():
            return None
        began = path.node.clock if path is not None else None
        return Clock(began or self._now(), self.traits.dates)

    def _prompt(self, turn: Turn) -> Prompt:
        coded, rendered = turn.coded, turn.rendered
        length = len(coded.tokens)
        return Prompt(
            tokens=coded.tokens,
            boundaries=boundaries(coded.anchors, length),
            head=coded.token_at(rendered.head) if rendered.head else 0,
            transient=self._transient_offset(turn) if turn.view.transient else None,
            generation=self._generation_offset(turn),
            images=turn.images,
        )

    def _generation_offset(self, turn: Turn) -> int:
        """Token offset of the generation prompt; nearly always a special token stands there."""
        coded, rendered = turn.coded, turn.rendered
        place = coded.anchor_at(rendered.generation)
        if place is not None:
            return place
        return max(0, len(coded.tokens) - len(self._tokenizer.encode(rendered.text[rendered.generation :])))

    def _transient_offset(self, turn: Turn) -> int | None:
        """Where the last message begins; None in a template that gives it no beginning of its own."""
        message = turn.view.new[-1].message.content.strip()
        for anchor in reversed(turn.coded.anchors):
            if anchor.start and anchor.char < turn.rendered.generation:
                alone = turn.rendered.generation - anchor.char < len(message) + 100
                return anchor.token if alone and anchor.token else None
        return None

    def _fresh(self, turn: Turn) -> int:
        """Tokens behind what the base had, less the share of messages that were said before (behind an insertion)."""
        coded, view = turn.coded, turn.view
        rest = len(coded.tokens) - coded.taken
        if view.base is None or all(shown.message.role != "assistant" for shown in view.new):
            return rest
        below = self._tree.said_below(view.base.node)
        entries = turn.reading.entries
        chars = [(shown.place, _size(shown.message)) for shown in view.new]
        known = [
            size
            for place, size in chars
            if place is not None and entries[turn.reading.indices[place]].facts.digest in below
        ]
        return rest - rest * sum(known) // max(1, sum(size for _, size in chars))

    # --- afterwards ---------------------------------------------------------

    def _await(self, reading: Reading) -> None:
        """The answer that this request goes on from may be out, but not yet recorded."""
        for key in reading.keys:
            if (event := self._awaited.get(key)) is not None:
                event.wait(_WAIT_SECONDS)

    def expect(self, prepared: Prepared, answer: Message) -> None:
        """`answer` is about to go out: a request that goes on from it waits until `record` was called."""
        if prepared.turn is not None:
            self._awaited[prepared.turn.key_behind(answer)] = threading.Event()

    def record(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> None:
        """Remembers a finished generation.

        Args:
            answer: the assistant turn as the client got it.
            tokens: as generated, the end-of-turn token included.
        """
        turn = prepared.turn
        if turn is None:
            return
        try:
            self._count(turn, self._guesses.seen(prepared.session, turn.reading.keys, turn.coded.tokens))
            # Every turn that says nothing says the same.
            if tokens and (answer.content.strip() or answer.tool_calls):
                path = self._path_of(turn, answer, tokens)
                node, gone = self._tree.add(path.node, path)
                if self._store is not None and node is path.node:
                    self._store.save(node)
                    self._store.forget(gone)
        finally:
            event = self._awaited.pop(turn.key_behind(answer), None)
            if event is not None:
                event.set()

    def predict(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> Prompt | None:
        """The prefix that this client's next request will probably have, the answer included.

        None where that is computed already, where nothing can be said, and for a client whose last guesses were wrong.
        """
        turn = prepared.turn
        if turn is None or not tokens:
            return None
        transient = [turn.view.messages[-1]] if turn.view.transient else []
        kept = turn.view.messages[: len(turn.view.messages) - len(transient)]
        try:
            expected = [*kept, answer, *followers(answer, transient)]
            rendered = self._renderer.render(expected, turn.view.tools, turn.variables)
        except BadRequest:
            return None
        coded = self._coder.code(rendered.text, self._path_of(turn, answer, tokens), answered=not self._strict)
        end = coded.token_at(known_until(rendered.text))
        guess = coded.tokens[:end]
        computed = (*turn.coded.tokens, *tokens[:-1])
        worth = self._guesses.made(prepared.session, turn.reading.keys, guess)
        if not worth or end <= turn.coded.token_at(rendered.head) or guess[: len(computed)] == computed[:end]:
            return None
        images = () if self._sights is None else self._sights.spans(rendered.text, guess, turn.request.pictures)
        if images is None:
            return None
        return Prompt(guess, boundaries(coded.anchors, end), coded.token_at(rendered.head), None, end, images)

    def _path_of(self, turn: Turn, answer: Message, tokens: Sequence[int]) -> Path:
        """The conversation with this answer at its end."""
        view, stem = turn.view, turn.stem
        shown = view.new[:-1] if view.transient else view.new
        says = not self._strict and self._coder.says(tuple(tokens), answer.content, bool(answer.tool_calls))
        spoken = " ".join([answer.content, *(call.arguments for call in answer.tool_calls)])
        digests, results = _said(turn.reading, stem.node.length if stem is not None else 0)
        node = Node(
            id=secrets.randbits(62),
            parent=stem.node.id if stem is not None else None,
            key=turn.key_behind(answer),
            owner=turn.request.owner,
            session=turn.request.session,
            nonce=stem.node.nonce if stem is not None else secrets.token_hex(2),
            length=len(turn.reading.keys) + 1,
            spoken=turn.spoken + self._count_tokens(spoken),
            clean=not view.foreign,
            noted=view.noted,
            digests=(*digests, answer_digest(answer.content, answer.tool_calls)),
            results=results,
            shown=() if self._strict else shown,
            told=view.told,
            tools=None if stem is not None and stem.tools == view.tools else view.tools,
            clock=turn.clock.moment if turn.clock is not None else None,
            grown=grown(stem, turn.rendering, common=turn.coded.common, taken=turn.coded.taken),
            answer=answer,
            answer_tokens=tuple(tokens) if says else (),
        )
        return extended(stem, node, turn.rendering)

    # --- figures ------------------------------------------------------------

    def _count(self, turn: Turn, guessed: bool | None) -> None:
        counters, base = self._counters, turn.view.base
        counters.add("notes", bool(turn.view.notes))
        counters.add("shown_as_sent", base is None and len(turn.reading.keys) > 1)
        if guessed is not None:
            counters.add("guesses_right" if guessed else "guesses_wrong")
        if base is not None:
            place = base.node.length - 1
            sent = turn.reading.entries[turn.reading.indices[place]].message
            counters.add("healed_turns", replace(sent, tool_calls=()) != replace(base.node.answer, tool_calls=()))

    def counters(self) -> dict[str, int]:
        """Totals since the start, for metrics: see `counters.NAMES`; `records` is how many answers are remembered."""
        return {**self._counters.totals(), "records": len(self._tree)}

    def locate(self, prepared: Prepared, token_index: int) -> Where:
        """Which message and field of the client's request the prompt token `token_index` comes from."""
        turn = prepared.turn
        text = self._around(prepared.prompt.tokens, token_index)
        if turn is None:
            return Where(None, "prompt", None, text)
        char, token, _ = turn.coded.anchor_before(token_index)
        char += len(self._tokenizer.decode(prepared.prompt.tokens[token:token_index]))
        marks = [anchor.char for anchor in turn.coded.anchors if anchor.start]
        return locate(turn.rendered, marks, turn.view.shown, turn.reading, char, text)

    def text_at(self, prepared: Prepared, index: int, tokens: Sequence[int]) -> str:
        """The end of the prompt's text up to its token `index`, and `tokens` behind it."""
        return self._around((*prepared.prompt.tokens[:index], *tokens), index)

    def _around(self, tokens: Sequence[int], index: int) -> str:
        return self._tokenizer.decode(tokens[max(0, index - 8) : index + 8])

    def close(self) -> None:
        """Writes what is waiting to disk; nothing may be recorded after."""
        if self._store is not None:
            self._store.close()


def _said(reading: Reading, behind: int) -> tuple[tuple[bytes, ...], tuple[tuple[str, bytes], ...]]:
    """What the links from `behind` on say, and the results of calls among them."""
    links = [reading.entries[index] for index in reading.indices[behind:]]
    results = [entry for entry in links if entry.message.tool_call_id and not entry.cleared]
    return (
        tuple(entry.facts.digest for entry in links),
        tuple((call_id(entry.message.tool_call_id), entry.facts.digest) for entry in results),
    )


def _size(message: Message) -> int:
    """Roughly the characters that a template makes of a message."""
    calls = sum(len(call.name) + len(call.arguments) + 40 for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls + 40


def _session(reading: Reading) -> str:
    """Named after how the conversation begins: up to its first user message."""
    for key, index in zip(reading.keys, reading.indices, strict=True):
        if reading.entries[index].message.role == "user":
            return f"auto-{key.hex()[:24]}"
    return f"auto-{(reading.keys[-1] if reading.keys else ROOT).hex()[:24]}"


__all__ = ["Pipeline", "Prepared", "Where"]
