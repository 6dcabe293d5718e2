"""Decides what a request's prompt shows: the conversation's own base or the request as it was sent, in tokens.

read -> find the base -> decide what is shown -> render -> tokenise. Nothing is remembered here: `pipeline` records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from start_llm.core.errors import ContextLengthExceeded
from start_llm.core.request import ChatRequest
from start_llm.core.vision import ImageSpan
from start_llm.prompt.clients import Clients
from start_llm.prompt.clock import OWN_DATES, VARIABLE, Clock
from start_llm.prompt.length import LengthCheck
from start_llm.prompt.match import MatchQuery, bases
from start_llm.prompt.ports import Template, Tokenizer
from start_llm.prompt.probe import Traits
from start_llm.prompt.reading import ChainReader, MessageChain
from start_llm.prompt.render import Renderer
from start_llm.prompt.sights import ImageMarks
from start_llm.prompt.tokenise import Coder
from start_llm.prompt.tree import ConversationTree, Path
from start_llm.prompt.turn import Turn
from start_llm.prompt.view import View, as_sent, going_on, strictly

_ANSWER_SHARE = 8  # an answer gets at least this part of the context before text is shown that the client did not send


class Composer:
    """Makes prompts of requests. Thread-safe.

    Attributes:
        length: refuses what is far too long for the context.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        traits: Traits,
        tree: ConversationTree,
        *,
        strict: bool,
        preserve_thinking: bool,
        clients: Clients,
        now: Callable[[], datetime],
        context: int,
        sights: ImageMarks | None,
    ) -> None:
        """
        Args:
            strict: nothing but the template's rendering of what was sent is ever shown.
            now, context: see `Pipeline`.
            sights: of a model that sees images.
        """
        self._strict = strict
        self.length = LengthCheck(tokenizer, context)
        self.renderer = Renderer(template, traits, preserve_thinking=preserve_thinking)
        self.coder = Coder(tokenizer, traits, sights, self.length)
        self._sights = sights
        self._tokenizer = tokenizer
        self._traits = traits
        self._tree = tree
        self._reader = ChainReader(Clients(()) if strict else clients)
        self._now = now
        self._context = context

    def read(self, request: ChatRequest) -> MessageChain:
        return self._reader.read(request.messages)

    def turn(self, request: ChatRequest, reading: MessageChain, variables: dict[str, Any]) -> Turn:
        """The first of these that fits the context: with what the client cleared or stripped, then as it was sent.

        Raises:
            BadRequest: the template refuses the conversation.
            ContextLengthExceeded: it is so long that not even its tokens are counted.
        """
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
        asked = MatchQuery.of(request, reading, clock.value if clock is not None else None)
        return self._rendered(request, reading, as_sent(asked, self._tree.arrange(request.tools)), variables, clock)

    def _based(self, request: ChatRequest, reading: MessageChain, variables: dict[str, Any]) -> Turn | None:
        """The request as its conversation goes on; None if it goes on from no answer of this server."""
        clock = self._clock(request, None)
        asked = MatchQuery.of(request, reading, clock.value if clock is not None else None)
        for match in bases(self._tree, asked):
            view = going_on(match, asked, self.count_tokens)
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

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _strict_turn(self, request: ChatRequest, reading: MessageChain, variables: dict[str, Any]) -> Turn:
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
        reading: MessageChain,
        view: View,
        variables: dict[str, Any],
        clock: Clock | None,
        stem: Path | None = None,
    ) -> Turn:
        """`stem`: whose tokens may be taken where the text is the same, for a view without a base."""
        if clock is not None:
            variables = {**variables, VARIABLE: clock}
        rendered = self.renderer.render(view.messages, view.tools, variables)
        stem = view.base or stem
        coded = self.coder.code(rendered.text, stem, answered=view.base is not None)
        images = self.spans(request, rendered.text, coded.tokens)
        if images is None:  # the path's tokens were made by another processor
            coded = self.coder.code(rendered.text, None)
            images = self.spans(request, rendered.text, coded.tokens) or ()
        spoken = self._spoken(reading)
        return Turn(request, reading, view, variables, rendered, coded, clock, stem, spoken, images)

    def spans(self, request: ChatRequest, text: str, tokens: Sequence[int]) -> tuple[ImageSpan, ...] | None:
        """Where the images of a rendered text stand among its tokens; None if they do not say the same."""
        return () if self._sights is None else self._sights.spans(text, tokens, request.pictures)

    def _spoken(self, reading: MessageChain) -> int:
        """Tokens that this server said on the way, whether or not the request goes on from them."""
        for key in reversed(reading.keys):
            if self._tree.has(key):
                return max((path.node.spoken for path in self._tree.at(key)), default=0)
        return 0

    def _clock(self, request: ChatRequest, path: Path | None) -> Clock | None:
        """The clock that the conversation began with, or the present one; None if the template prints no date."""
        if self._strict or not self._traits.dates or OWN_DATES & request.template_kwargs.keys():
            return None
        began = path.node.clock if path is not None else None
        return Clock(began or self._now(), self._traits.dates)
