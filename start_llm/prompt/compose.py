"""Decides what a request's prompt shows: the conversation's own base or the request as it was sent, in tokens.

read -> find the base -> decide what is shown -> render -> tokenise. Nothing is remembered here: `pipeline` records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial

from start_llm.core.errors import ContextLengthExceeded
from start_llm.core.messages import MARK
from start_llm.core.prompt import ImageSpan, Prompt
from start_llm.core.report import Miss
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.prompt.clients import UNKNOWN, Clients
from start_llm.prompt.guard import Guard
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.match import NEEDED, PROOF_TOKENS, BaseMatch, BaseSearch, MatchQuery, Proof
from start_llm.prompt.prepared import Prepared
from start_llm.prompt.reading import ChainReader, MessageChain
from start_llm.prompt.render import Renderer
from start_llm.prompt.sent import SentTexts
from start_llm.prompt.tokenise import Coder, Eyes, ImageMarks, LengthCheck
from start_llm.prompt.traits import OWN_DATES, VARIABLE, Clock, Traits
from start_llm.prompt.tree import ConversationTree, Difference, Path, Rendering, ShownMessage
from start_llm.prompt.view import View, as_sent, going_on

# Characters of a message that may have a conversation in it, turns that it is compared with, characters of a line that
# tells, and how many such lines tell it: of each message of these turns the longest line is looked for.
_FLATTENED = 1000, 16, 16, 3
# An answer gets at least this part of the context, but not more tokens than that, before text is shown that the client
# did not send; of less room such text takes this part. A summary is asked for when the context is nearly full, and
# computing all of it again takes minutes.
_ANSWER_SHARE, _ANSWER_TOKENS = 8, 8192


class Composer:
    """Makes prompts of requests. `strict`: nothing is shown but what the template makes of them. Thread-safe."""

    def __init__(
        self,
        template: HFTemplate,
        tokenizer: HFTokenizer,
        traits: Traits,
        tree: ConversationTree,
        *,
        settings: Settings,
        clients: Clients,
        now: Callable[[], datetime],
        context: int,
        eyes: Eyes | None,
    ) -> None:
        """See `Pipeline`."""
        self.strict = settings.cache_drift_policy == "strict"
        preserve = settings.preserve_thinking
        self._image_marks = ImageMarks(eyes) if eyes is not None else None
        self.length = LengthCheck(tokenizer, context)
        names = () if settings.allow_control_tokens else tokenizer.control_tokens(template.source)
        guard = Guard(names, template.source, tokenizer.normal if names else None)
        self.renderer = Renderer(template, traits, preserve_thinking=preserve, images=eyes is not None, guard=guard)
        self.coder = Coder(tokenizer, traits, self._image_marks, self.length)
        self.sent = SentTexts(lambda text: len(self.coder.encode(text)[0]))
        self._tokenizer = tokenizer
        self._traits = traits
        self._tree = tree
        self._reader = ChainReader(Clients(()) if self.strict else clients, as_sent=self.strict)
        self._now = now
        self._context = context

    def read(self, request: ChatRequest, *, thinking: bool) -> MatchQuery:
        """Raises BadRequest: the client names something that is no variable of a template."""
        variables = self.renderer.variables(
            thinking=thinking, effort=request.reasoning_effort, extra=request.template_kwargs
        )
        clock = None
        if self._traits.dates and not self.strict and not OWN_DATES & request.template_kwargs.keys():
            clock = Clock(self._now(), self._traits.dates)
        return MatchQuery(request, self._reader.read(request.messages, request.owner), variables, clock)

    def raw(self, request: ChatRequest, tokens: tuple[int, ...]) -> Prepared:
        """A request whose text is the prompt."""
        chain, view = self._reader.read((), request.owner), View(None, (), ())
        rendering = Rendering("", 0, tokens=tokens)
        new = self.sent.new_tokens(request.owner, chain, view, rendering)
        return Prepared(request, chain, view, rendering, Prompt(tokens, generation=len(tokens)), {}, new=new)

    def compose(self, query: MatchQuery) -> Prepared:
        """The first of these that fits the context: with what the client cleared or stripped, then as it was sent.

        Raises BadRequest, ContextLengthExceeded as `Pipeline.prepare`.
        """
        request = query.request
        if self.strict:
            return self._strictly(query)
        sent, query = query, self._as_known(query)
        if any(entry.facts.has("cleared") for entry in query.chain.entries):
            result_of = partial(self._tree.result_of, request.owner)
            chain = self._reader.read(request.messages, request.owner, result_of, query.chain.client)
            kept = replace(query, chain=chain)
            prepared = self._going_on(kept)[0] if chain.keys != query.chain.keys else None
            if prepared is not None and self._fits(prepared, self._context // 2):
                return prepared
        prepared, miss = self._going_on(query)
        if prepared is not None:
            answer = min(self._context // _ANSWER_SHARE, _ANSWER_TOKENS)
            room = self._context - min(answer, request.max_tokens or answer)
            if prepared.view.difference is Difference.NONE or self._fits(prepared, room):
                return prepared
            miss = Miss("policy", 0, detail="with what its client left out, the prompt would not fit the context")
        view = as_sent(sent, self._tree.arrange(request.owner, request.tools))
        plain = self._prepared(sent, view, miss=miss)
        left = self._context - len(plain.rendering.tokens)
        if prepared is not None and left > 0 and self._fits(prepared, self._context - left + left // _ANSWER_SHARE):
            return prepared  # hardly any room is left for an answer as it is
        return plain

    def _as_known(self, query: MatchQuery) -> MatchQuery:
        """The request as read by the rules of the client whose conversation it goes on with, where its system text,
        another one than at first, does not show whose it is."""
        request, clients = query.request, self._reader.clients
        answered = any(message.role == "assistant" for message in request.messages)
        if answered and query.chain.client is UNKNOWN and not any(map(self._tree.has, query.chain.keys)):
            for client in clients.clients:
                chain = self._reader.read(request.messages, request.owner, client=client)
                key = next(filter(self._tree.has, reversed(chain.keys)), b"")
                if any(clients.of([path.shown[0].message]) is client for path in self._tree.at(key)):
                    return replace(query, chain=chain)
        return query

    def _strictly(self, query: MatchQuery) -> Prepared:
        """The client's messages, and nothing else."""
        request = query.request
        view = View(None, tuple(ShownMessage(message, None) for message in request.messages), request.tools)
        paths = (path for key in reversed(query.chain.keys) for path in self._tree.at(key))
        return self._prepared(query, view, stem=next(paths, None))

    def _going_on(self, query: MatchQuery) -> tuple[Prepared | None, Miss | None]:
        """The request as its conversation goes on, if it goes on from an answer of this server; and why not."""
        search = BaseSearch(self._tree, query)
        for match in search:
            view = going_on(match, query, self.count_tokens)
            if isinstance(view, str):
                search.reject(match, view)
                continue
            if self._has_all_images(view, query.request):
                miss = self._miss(search, match.path.node.length)
                with suppress(ContextLengthExceeded):  # as it was sent it may be shorter
                    return self._prepared(query, view, miss=miss), miss
            search.reject(match, "an image of it did not come along, or the prompt would be too long")
        return None, self._miss(search, 0)

    def _miss(self, search: BaseSearch, length: int) -> Miss | None:
        """Why a history is not shown from its deepest answer on, but from `length` links; None if it is."""
        rejected, request, chain = search.rejected, search.query.request, search.query.chain
        if rejected is not None and rejected.path.node.length > length:
            return _rejection(rejected, search.why, chain, request.session)
        behind = chain.links[length:]
        answers = [number for number, entry in enumerate(behind) if entry.message.role == "assistant"]
        if not answers:
            return None if length else self._flattened(chain, request.owner)
        history = behind[: answers[-1] + 1]
        unknown = (entry for entry in history if not self.sent.knows(request.owner, entry.facts.digest))
        index = next(unknown, history[0]).index
        return Miss("diverged", 0, message=index, field="content", detail="no earlier turn has this message here")

    def _flattened(self, chain: MessageChain, owner: str | None) -> Miss | None:
        """Whether a conversation that was served is written into one message: nothing of it stands in its place."""
        long = [entry for entry in chain.links if len(entry.message.content) > _FLATTENED[0]]
        nodes = self._tree.newest(owner, _FLATTENED[1]) if long else []
        texts = [one.content for node in nodes for one in (*(shown.message for shown in node.shown), node.answer)]
        lines = {max(map(str.strip, text.split("\n")), key=len) for text in texts}
        known = [line for line in lines if len(line) > _FLATTENED[2]]
        for entry in long:
            if sum(line in entry.message.content for line in known) >= _FLATTENED[3]:
                index = entry.index
                return Miss("flattened", 0, message=index, field="content", detail="a conversation in one message")
        return None

    def _has_all_images(self, view: View, request: ChatRequest) -> bool:
        """Whether every image of `view` came with the request: one that its client has cleared cannot be computed."""
        shown = (mark[1] for message in view.messages for mark in MARK.finditer(message.content))
        return self._image_marks is None or all(image in request.pictures for image in shown)

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _fits(self, prepared: Prepared, limit: int) -> bool:
        return not self._context or len(prepared.rendering.tokens) <= limit

    def _prepared(
        self, query: MatchQuery, view: View, *, stem: Path | None = None, miss: Miss | None = None
    ) -> Prepared:
        """`stem`: whose tokens may be taken where the text is the same, for a view without a base."""
        request, chain, variables, clock = query.request, query.chain, query.variables, query.clock
        if clock is not None:
            began = view.base.node.clock if view.base is not None else None
            clock = replace(clock, moment=began or clock.moment)
            variables = {**variables, VARIABLE: clock}
        text = self.renderer.render(view.messages, view.tools, variables, request.begun)
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
        char, generation, _ = rendering.anchor_at(rendering.generation)
        if char != rendering.generation:  # nearly always a special token stands there
            generation = len(rendering.tokens) - self.count_tokens(rendering.text[rendering.generation :])
        return Prompt(
            tokens=rendering.tokens,
            boundaries=rendering.boundaries(len(rendering.tokens)),
            system_end=rendering.anchor_at(rendering.head).token if rendering.head else 0,
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
        known = next(filter(self._tree.has, reversed(chain.keys)), b"")
        return max((path.node.spoken for path in self._tree.at(known)), default=0)


def _transient_offset(view: View, rendering: Rendering) -> int | None:
    """Where the last message begins; None in a template that gives it no beginning of its own."""
    message = view.new[-1].message.content.strip()
    for anchor in reversed(rendering.anchors):
        if anchor.start and anchor.char < rendering.generation:
            alone = rendering.generation - anchor.char < len(message) + 100
            return anchor.token if alone and anchor.token else None
    return None


def _rejection(match: BaseMatch, why: str, chain: MessageChain, session: str | None) -> Miss:
    """Why a match with the same words is not used; `why`: of one that is proved."""
    reason, remedy = "unproved", ""
    if match.usable:
        reason = "diverged"
    elif not match.same_session:
        named = "another session_id" if session is not None else "a session_id, and this request has none"
        why, remedy = f"the earlier turns have {named}", "send one session_id in all turns"
    elif session is not None or NEEDED[match.difference] is Proof.WORDS:
        why = f"fewer than {PROOF_TOKENS} tokens were generated to know it again"
    else:
        why, remedy = "nothing names the conversation", "send session_id in all turns"
    return replace(_placed(match, chain, why), reason=reason, remedy=remedy)


def _placed(match: BaseMatch, chain: MessageChain, why: str) -> Miss:
    """`why`, with the first place that differs."""
    if not match.changes:
        return Miss("", 0, detail=f"the same words, but {why}")
    change = match.changes[0]
    slot = change.slot
    if slot.rule == "system":
        lines = zip((change.old or "").split("\n"), (change.new or "").split("\n"), strict=False)
        line = next((number for number, (old, new) in enumerate(lines, 1) if old != new), 1)
        return Miss("", 0, message=slot.place, field="system", detail=f"line {line} differs; {why}")
    if slot.rule in ("tool", "date"):
        name = f"tool {slot.name}" if slot.rule == "tool" else "the template's date"
        return Miss("", 0, field="tools", detail=f"{name} differs; {why}")
    places = (entry.index for entry in chain.entries if any(one == slot for one, _ in entry.slots))
    detail = f"a block of {slot.rule} differs; {why}"
    return Miss("", 0, message=next(places, None), field="content", rule=slot.rule, detail=detail)
