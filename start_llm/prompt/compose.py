"""Decides what a request's prompt shows: the conversation's own base or the request as it was sent, in tokens.

read -> find the base -> decide what is shown -> render -> tokenise. Nothing is remembered here: `pipeline` records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from start_llm.core.errors import ContextLengthExceeded
from start_llm.core.prompt import ImageSpan, Prompt
from start_llm.core.report import Miss
from start_llm.core.request import ChatRequest
from start_llm.prompt.clients import Clients
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.match import BaseMatch, BaseSearch, MatchQuery, Proof
from start_llm.prompt.prepared import Prepared
from start_llm.prompt.reading import ChainReader, MessageChain
from start_llm.prompt.render import Renderer
from start_llm.prompt.sent import SentTexts
from start_llm.prompt.tokenise import Coder, ImageMarks, LengthCheck
from start_llm.prompt.traits import OWN_DATES, VARIABLE, Clock, Traits
from start_llm.prompt.tree import ConversationTree, Difference, Path, Rendering
from start_llm.prompt.view import View, as_sent, going_on, strictly

_ANSWER_SHARE = 8  # an answer gets at least this part of the context before text is shown that the client did not send


class Composer:
    """Makes prompts of requests. Thread-safe.

    Attributes:
        length: refuses what is far too long for the context.
        sent: what owners have sent before.
    """

    def __init__(
        self,
        template: HFTemplate,
        tokenizer: HFTokenizer,
        traits: Traits,
        tree: ConversationTree,
        *,
        strict: bool,
        preserve_thinking: bool,
        clients: Clients,
        now: Callable[[], datetime],
        context: int,
        image_marks: ImageMarks | None,
    ) -> None:
        """
        Args:
            strict: nothing but the template's rendering of what was sent is ever shown.
            now, context: see `Pipeline`.
            image_marks: of a model that sees images.
        """
        self._strict = strict
        self.length = LengthCheck(tokenizer, context)
        self.renderer = Renderer(template, traits, preserve_thinking=preserve_thinking, images=image_marks is not None)
        self.coder = Coder(tokenizer, traits, image_marks, self.length)
        self.sent = SentTexts(lambda text: len(self.coder.encode(text)[0]))
        self._image_marks = image_marks
        self._tokenizer = tokenizer
        self._traits = traits
        self._tree = tree
        self._reader = ChainReader(Clients(()) if strict else clients)
        self._now = now
        self._context = context

    def read(self, request: ChatRequest) -> MessageChain:
        return self._reader.read(request.messages, request.owner)

    def raw(self, request: ChatRequest, tokens: tuple[int, ...]) -> Prepared:
        """A request whose text is the prompt."""
        chain, view = self._reader.read((), request.owner), View(None, (), ())
        rendering = Rendering("", 0, tokens=tokens)
        new = self.sent.new_tokens(request.owner, chain, view, rendering)
        return Prepared(request, chain, view, rendering, Prompt(tokens, generation=len(tokens)), {}, new=new)

    def compose(self, request: ChatRequest, chain: MessageChain, variables: dict[str, Any]) -> Prepared:
        """The first of these that fits the context: with what the client cleared or stripped, then as it was sent.

        Raises:
            BadRequest: the template refuses the conversation.
            ContextLengthExceeded: it is so long that not even its tokens are counted.
        """
        if self._strict:
            return self._strictly(request, chain, variables)
        if any(entry.cleared for entry in chain.entries):
            kept = self._reader.read(
                request.messages, request.owner, lambda call: self._tree.result_of(request.owner, call)
            )
            prepared = self._going_on(request, kept, variables)[0] if kept.keys != chain.keys else None
            if prepared is not None and self._fits(prepared, self._context // 2):
                return prepared
        prepared, miss = self._going_on(request, chain, variables)
        if prepared is not None:
            if prepared.view.difference is Difference.NONE or self._fits(prepared, self._room(request)):
                return prepared
            miss = Miss("policy", 0, detail="with what its client left out, the prompt would not fit the context")
        clock = self._clock(request, None)
        query = MatchQuery.of(request, chain, clock.value if clock is not None else None)
        view = as_sent(query, self._tree.arrange(request.owner, request.tools))
        return self._prepared(request, chain, view, variables, clock, miss=miss)

    def _going_on(
        self, request: ChatRequest, chain: MessageChain, variables: dict[str, Any]
    ) -> tuple[Prepared | None, Miss | None]:
        """The request as its conversation goes on, if it goes on from an answer of this server; and why not."""
        clock = self._clock(request, None)
        query = MatchQuery.of(request, chain, clock.value if clock is not None else None)
        search = BaseSearch(self._tree, query)
        for match in search:
            view = going_on(match, query, self.count_tokens)
            if view is not None and self._at_hand(view, request):
                miss = self._miss(request, chain, search, match.path.node.length)
                with suppress(ContextLengthExceeded):  # as it was sent it may be shorter
                    clock = self._clock(request, match.path)
                    return self._prepared(request, chain, view, variables, clock, miss=miss), miss
            search.reject(match)
        return None, self._miss(request, chain, search, 0)

    def _miss(self, request: ChatRequest, chain: MessageChain, search: BaseSearch, length: int) -> Miss | None:
        """Why a history is not shown from its deepest answer on, but from `length` links; None if it is."""
        rejected = search.rejected
        if rejected is not None and rejected.path.node.length > length:
            return _rejection(rejected, chain, request.session)
        behind = chain.indices[length:]
        answers = [number for number, index in enumerate(behind) if chain.entries[index].message.role == "assistant"]
        if not answers:
            return None
        history = behind[: answers[-1] + 1]
        digests = ((index, chain.entries[index].facts.digest) for index in history)
        unknown = (index for index, digest in digests if not self.sent.knows(request.owner, digest))
        index = next(unknown, history[0])
        return Miss("diverged", 0, message=index, field="content", detail="no earlier turn has this message here")

    def _at_hand(self, view: View, request: ChatRequest) -> bool:
        """Every image of `view` came with the request: one that did not could not be computed."""
        marks = self._image_marks
        return marks is None or not any(marks.unknown(message.content, request.pictures) for message in view.messages)

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _strictly(self, request: ChatRequest, chain: MessageChain, variables: dict[str, Any]) -> Prepared:
        view = strictly(request.messages, request.tools)
        paths = (path for key in reversed(chain.keys) for path in self._tree.at(key))
        return self._prepared(request, chain, view, variables, None, stem=next(paths, None))

    def _fits(self, prepared: Prepared, limit: int) -> bool:
        return not self._context or len(prepared.rendering.tokens) <= limit

    def _room(self, request: ChatRequest) -> int:
        """Most tokens of a prompt that shows something which the client did not send."""
        answer = self._context // _ANSWER_SHARE
        return self._context - min(answer, request.max_tokens or answer)

    def _prepared(
        self,
        request: ChatRequest,
        chain: MessageChain,
        view: View,
        variables: dict[str, Any],
        clock: Clock | None,
        *,
        stem: Path | None = None,
        miss: Miss | None = None,
    ) -> Prepared:
        """`stem`: whose tokens may be taken where the text is the same, for a view without a base."""
        if clock is not None:
            variables = {**variables, VARIABLE: clock}
        text = self.renderer.render(view.messages, view.tools, variables)
        stem = view.base or stem
        rendering = self.coder.code(text, stem, answered=view.base is not None)
        images = self.spans(request, rendering)
        if images is None:  # the path's tokens were made by another processor
            rendering = self.coder.code(text, None)
            images = self.spans(request, rendering) or ()
        return Prepared(
            request,
            chain,
            view,
            rendering,
            self._prompt(view, rendering, images),
            variables,
            clock,
            stem,
            spoken=self._spoken(chain),
            new=self.sent.new_tokens(request.owner, chain, view, rendering),
            miss=miss,
        )

    def _prompt(self, view: View, rendering: Rendering, images: tuple[ImageSpan, ...]) -> Prompt:
        """The tokens, and the places in them that the engine keeps checkpoints at."""
        generation = rendering.anchor_at(rendering.generation)
        if generation is None:  # nearly always a special token stands there
            generation = len(rendering.tokens) - self.count_tokens(rendering.text[rendering.generation :])
        return Prompt(
            tokens=rendering.tokens,
            boundaries=rendering.boundaries(len(rendering.tokens)),
            head=rendering.token_at(rendering.head) if rendering.head else 0,
            transient=_transient_offset(view, rendering) if view.transient else None,
            generation=max(0, generation),
            images=images,
        )

    def spans(self, request: ChatRequest, rendering: Rendering) -> tuple[ImageSpan, ...] | None:
        """Where the images of a rendered text stand among its tokens; None if they do not say the same."""
        marks = self._image_marks
        return () if marks is None else marks.spans(rendering.text, rendering.tokens, request.pictures)

    def _spoken(self, chain: MessageChain) -> int:
        """Tokens that this server said on the way, whether or not the request goes on from them."""
        for key in reversed(chain.keys):
            if self._tree.has(key):
                return max((path.node.spoken for path in self._tree.at(key)), default=0)
        return 0

    def _clock(self, request: ChatRequest, path: Path | None) -> Clock | None:
        """The clock that the conversation began with, or the present one; None if the template prints no date."""
        if self._strict or not self._traits.dates or OWN_DATES & request.template_kwargs.keys():
            return None
        began = path.node.clock if path is not None else None
        return Clock(began or self._now(), self._traits.dates)


def _transient_offset(view: View, rendering: Rendering) -> int | None:
    """Where the last message begins; None in a template that gives it no beginning of its own."""
    message = view.new[-1].message.content.strip()
    for anchor in reversed(rendering.anchors):
        if anchor.start and anchor.char < rendering.generation:
            alone = rendering.generation - anchor.char < len(message) + 100
            return anchor.token if alone and anchor.token else None
    return None


def _rejection(match: BaseMatch, chain: MessageChain, session: str | None) -> Miss:
    """Why a match with the same words is not used."""
    if match.usable:
        return _placed(match, chain, "diverged", "a note of what changed would be too long, or two conversations fit")
    if not match.same_session:
        named = "another session_id" if session is not None else "a session_id, and this request has none"
        return _placed(match, chain, "unproved", f"the earlier turns have {named}", "send one session_id in all turns")
    if session is None:
        return _placed(match, chain, "unproved", "nothing names the conversation", "send session_id in all turns")
    few = "too few tokens were generated to know it again"
    return _placed(match, chain, "unproved", few if match.proof is Proof.NONE else "nothing proves it")


def _placed(match: BaseMatch, chain: MessageChain, reason: str, why: str, remedy: str = "") -> Miss:
    """`why`, with the first place that differs."""
    if not match.changes:
        return Miss(reason, 0, detail=f"the same words, but {why}", remedy=remedy)
    change = match.changes[0]
    slot = change.slot
    if slot.rule == "system":
        lines = zip((change.old or "").split("\n"), (change.new or "").split("\n"), strict=False)
        line = next((number for number, (old, new) in enumerate(lines, 1) if old != new), 1)
        return Miss(reason, 0, message=slot.place, field="system", detail=f"line {line} differs; {why}", remedy=remedy)
    if slot.rule in ("tool", "date"):
        name = f"tool {slot.name}" if slot.rule == "tool" else "the template's date"
        return Miss(reason, 0, field="tools", detail=f"{name} differs; {why}", remedy=remedy)
    places = (index for index, entry in enumerate(chain.entries) if any(one == slot for one, _ in entry.slots))
    return Miss(
        reason,
        0,
        message=next(places, None),
        field="content",
        rule=slot.rule,
        detail=f"a block of {slot.rule} differs; {why}",
        remedy=remedy,
    )
