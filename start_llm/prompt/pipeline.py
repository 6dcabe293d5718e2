"""One request's way from messages to tokens. The page to read first in this room.

heal -> canonical chain -> find the turn record -> decide what is shown -> render -> tokenise. Every step falls back to
the plain one when the record is missing: a record can save work, it is never needed for correctness, because the
rendered text is compared before any token is taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, Tool
from start_llm.core.prompt import Prompt
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.prompt.canonical import ROOT, Facts, FactsMemory, answer_key, body_links, is_reply, link
from start_llm.prompt.clock import OWN_DATES, VARIABLE, Clock
from start_llm.prompt.counters import Counters, healed_turns, rejected
from start_llm.prompt.heal import HealingStore, cleared, filed_turns
from start_llm.prompt.locate import Where, locate, message_offsets
from start_llm.prompt.ports import Template, Tokenizer
from start_llm.prompt.predict import Guesses, followers, known_until
from start_llm.prompt.prepared import Match, Prepared, Turn, next_generation
from start_llm.prompt.probe import probe
from start_llm.prompt.render import Rendered, Renderer
from start_llm.prompt.tokenise import Coded, Coder, boundaries
from start_llm.prompt.toolorder import ToolOrder
from start_llm.prompt.turndb import TurnDB
from start_llm.prompt.turns import Generation, Open, Record, TurnMemory, head_size, inherited_opens, with_generation
from start_llm.prompt.view import Entry, View, append_only, as_sent, changed_head
from start_llm.prompt.volatile import Rules

log = logging.getLogger(__name__)


class Pipeline:
    """Turns requests into prompts and remembers what was shown. All methods may be called from any thread."""

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        *,
        settings: Settings,
        rules: Rules,
        store: TurnDB | None = None,
        now: Callable[[], datetime] = datetime.now,
        context: int = 0,
    ) -> None:
        """Probes the template and reads what `store` holds for it; `close` closes the store.

        `now` tells the local time. `context`: tokens that a prompt and its answer may have, 0 if there is no limit.

        Raises:
            TemplateError: the template cannot render one user message.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self.traits = probe(template, tokenizer)
        self._renderer = Renderer(template, self.traits, preserve_thinking=settings.preserve_thinking)
        self._coder = Coder(tokenizer, self.traits)
        use_rules = settings.cache_canonicalize_tool_context
        self._facts = FactsMemory(rules if use_rules else Rules(()))
        self._healing = HealingStore()
        self._turns = TurnMemory()
        self._guesses = Guesses()
        self._counters = Counters()
        self._now = now
        self._tools = ToolOrder()
        self._context = context
        self._store = store
        if store is not None:
            self._restore(store)

    def _restore(self, store: TurnDB) -> None:
        stored = store.load(self.traits.fingerprint)
        self._turns.restore(stored.records, stored.next_id)
        for parent, key, entry in stored.healing:
            self._healing.restore(parent, key, entry)
        for names in stored.toollists:
            self._tools.learn(names)

    # --- request ------------------------------------------------------------

    def prepare(self, request: ChatRequest, *, thinking: bool) -> Prepared:
        """Makes the prompt.

        Raises:
            BadRequest: no messages, or a conversation that the template refuses.
        """
        if request.prompt is not None:
            return self._completion(request)
        if not request.messages:
            raise BadRequest("messages is empty; at least one message is needed", param="messages")
        match = self._match(request)
        if any(cleared(message) for message in request.messages):
            kept = self._match(request, keep_results=True)
            # A client clears old results to save context. As long as there is plenty, computing all that stands
            # behind them anew is the greater loss; the model still sees them then.
            if not kept.strict and kept.depth > match.depth and self._all_shown(kept):
                prepared = self._prepare(request, thinking, kept)
                if not self._context or len(prepared.prompt.tokens) * 2 <= self._context:
                    return prepared
        return self._prepare(request, thinking, match)

    def _all_shown(self, match: Match) -> bool:
        """Every cleared result that was taken for the one before is shown as that one."""
        counted = [entry for entry in match.entries if entry.link is not None]
        rest = [entry for entry in counted[match.depth :] if cleared(entry.message)]
        own = self._facts.get([entry.message for entry in rest])
        return all(entry.facts.digest == facts.digest for entry, facts in zip(rest, own, strict=True))

    def _match(self, request: ChatRequest, keep_results: bool = False) -> Match:
        """`keep_results`: tool results that the client has cleared are taken for those that were there."""
        entries, chain, keys = self._chain(request.messages, keep_results)
        strict = self._strict(entries)
        return Match(entries, chain, keys, self._base(entries, chain, keys, request.tools, strict), strict)

    def _prepare(self, request: ChatRequest, thinking: bool, match: Match) -> Prepared:
        entries, chain, keys, base, strict = match
        clock = None if strict else self._clock(request, base)
        view = self._view(request, match, clock)
        variables = self._renderer.variables(
            thinking=thinking, effort=request.reasoning_effort, extra=request.template_kwargs
        )
        if clock is not None:
            variables[VARIABLE] = clock
        rendered = self._renderer.render([shown.message for shown in view.shown], view.tools, variables)
        coded = self._code(rendered, match)
        healed = healed_turns(request.messages, entries, base[1].chain[: base[2]] if base is not None else ())
        turn = Turn(tuple(entries), view, chain, tuple(keys), variables, rendered, coded, base, clock, healed)
        offsets = message_offsets(rendered.text, [shown.message for shown in view.shown])
        return Prepared(
            prompt=self._prompt(turn, offsets),
            in_reasoning=rendered.in_reasoning,
            fresh=self._fresh(turn, offsets),
            session=request.session or _session(entries),
            one_shot=not request.tools and all(message.role != "assistant" for message in request.messages),
            notes=view.notes,
            turn=turn,
        )

    def _completion(self, request: ChatRequest) -> Prepared:
        prompt = request.prompt
        assert prompt is not None
        tokens = tuple(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        if not tokens:
            raise BadRequest("prompt is empty; at least one token is needed", param="prompt")
        session = request.session or "completion"
        return Prepared(Prompt(tokens, generation=len(tokens)), False, len(tokens), session, one_shot=True)

    def _chain(
        self, messages: Sequence[Message], keep_results: bool = False
    ) -> tuple[list[Entry], tuple[bytes, ...], list[bytes | None]]:
        """Heals the messages in order and links them: entries, the chain, and the answer keys along the chain."""
        entries: list[Entry] = []
        chain: list[bytes] = []
        keys: list[bytes | None] = []
        parent = ROOT
        facts = self._facts.get([message for message in messages if message.role != "assistant"])
        known = iter(facts)
        filed = filed_turns(messages)
        told = 0
        for index, message in enumerate(messages):
            key: bytes | None = None
            if index in filed and (turn := self._healing.from_file(parent, filed[index])) is not None:
                message, told = turn, index + len(filed[index])
                fact, key = self._answer(message)
            elif index < told:
                # Told with the message before it; the prompt leaves an empty message out.
                message = replace(message, content="")
                fact = replace(self._facts.get([message])[0], counts=False, shown=replace(message))
            elif entries and is_reply(message, entries[-1].facts):
                fact = replace(self._facts.get([message])[0], counts=False)
            elif message.role == "assistant":
                message = self._healing.heal(parent, message)
                fact, key = self._answer(message)
            else:
                fact = next(known)
                if keep_results and cleared(message):
                    digest = self._turns.result_after(parent, message.tool_call_id)
                    fact = replace(fact, digest=digest) if digest is not None else fact
            if fact.counts:
                parent = link(parent, fact.digest)
                chain.append(parent)
                keys.append(key)
            entries.append(Entry(message, fact, parent if fact.counts else None))
        return entries, tuple(chain), keys

    def _answer(self, message: Message) -> tuple[Facts, bytes]:
        """Facts and identity of an assistant turn."""
        return self._facts.get([message])[0], answer_key(message.content, message.tool_calls)

    def _base(
        self,
        entries: list[Entry],
        chain: tuple[bytes, ...],
        keys: list[bytes | None],
        tools: Sequence[Tool],
        strict: bool,
    ) -> tuple[int, Record, int] | None:
        """The record to go on from, and how many messages of the chain it shares.

        A conversation whose system text was changed on the way is found by what stands behind that.
        """
        base = self._turns.find(chain, keys, tools)
        counted = [entry for entry in entries if entry.link is not None]
        head = head_size([entry.message for entry in counted])
        if strict or not head:
            return base
        if base is not None and changed_head(entries, base[1], base[2], self._facts.lasting) is None:
            # It began with another text, and the note that told this one stands behind what is shared.
            base = None
        answers = [index + 1 for index, entry in enumerate(counted) if entry.message.role == "assistant"]
        shown = 0 if base is None else base[2] + (next_generation(base, keys) is not None)
        if base is not None and shown >= max(answers, default=0):
            # All but what is new was shown with this very text.
            return base
        other = self._turns.find_body(
            head, body_links(head, [entry.facts.digest for entry in counted[head:]]), keys, tools
        )
        if other is None or (base is not None and base[2] >= other[2]):
            return base
        _, record, depth = other
        spoke = any(entry.message.role == "assistant" for entry in counted[: depth + 1])
        return other if spoke and changed_head(entries, record, depth, self._facts.lasting) is not None else base

    def _strict(self, entries: list[Entry]) -> bool:
        """The model is to be shown the client's own bytes."""
        settings = self._settings
        if settings.cache_drift_policy == "strict" or not settings.cache_canonicalize_tool_context:
            return True
        removed = sum(entry.facts.removed for entry in entries) if settings.cache_norm_safety_check else 0
        return removed * 10 > sum(len(entry.message.content) for entry in entries)

    def _clock(self, request: ChatRequest, base: tuple[int, Record, int] | None) -> Clock | None:
        """The clock that the conversation began with, for a template that prints a date."""
        if not self.traits.dates or OWN_DATES & request.template_kwargs.keys():
            return None
        began = base[1].clock if base is not None else None
        return Clock(began or self._now(), self.traits.dates)

    def _view(self, request: ChatRequest, match: Match, clock: Clock | None) -> View:
        if match.strict:
            return as_sent(match.entries, request.tools, telemetry=True)
        if match.base is None:
            return as_sent(match.entries, self._tools.arrange(request.tools), telemetry=False)
        dates = (clock.value, Clock(self._now(), clock.formats).value) if clock is not None else ("", "")
        return append_only(
            match.entries,
            request.tools,
            match.base[1],
            match.depth,
            self._tools,
            continues=match.generation is not None,
            text_of=self._facts.lasting,
            dates=dates,
        )

    def _code(self, rendered: Rendered, match: Match) -> Coded:
        record = match.base[1] if match.base is not None else None
        opened, generation = match.generation or (None, None)
        return self._coder.code(rendered.text, record, opened, generation)

    def _prompt(self, turn: Turn, offsets: list[int | None]) -> Prompt:
        coded, rendered, shown = turn.coded, turn.rendered, turn.view.shown
        length = len(coded.tokens)
        transient = None
        if shown and shown[-1].transient and offsets[-1] is not None:
            transient = coded.token_at(offsets[-1]) or None
            if transient is not None and len(shown) > 1 and offsets[-2] is not None:
                # A template that joins messages gives it no beginning of its own.
                transient = None if transient <= coded.token_at(offsets[-2]) else transient
        return Prompt(
            tokens=coded.tokens,
            boundaries=boundaries(coded.anchors, length),
            head=coded.token_at(rendered.head) if rendered.head else 0,
            transient=transient,
            generation=self._generation_offset(turn),
        )

    def _generation_offset(self, turn: Turn) -> int:
        """Token offset of the generation prompt; nearly always a special token stands there."""
        coded, rendered = turn.coded, turn.rendered
        length = len(coded.tokens)
        for char, token, _ in reversed(coded.anchors[-8:]):
            if char == rendered.generation:
                return token
        return max(0, length - len(self._tokenizer.encode(rendered.text[rendered.generation :])))

    def _fresh(self, turn: Turn, offsets: list[int | None]) -> int:
        coded = turn.coded
        if turn.base is None:
            return len(coded.tokens)
        if coded.generated is not None:
            return len(coded.tokens) - coded.taken
        record = turn.base[1]
        known = turn.view.matched + (next_generation(turn.base, turn.keys) is not None)
        starts = [coded.token_at(offset) if offset is not None else None for offset in offsets[known:]]
        if all(start is None for start in starts):
            return len(coded.tokens) - self._generation_offset(turn)
        # After an insertion or an edit, messages follow that were sent before.
        seen = {shown.digest for shown in record.shown if shown.link is not None}
        fresh, end = 0, len(coded.tokens)
        for shown, start in zip(reversed(turn.view.shown[known:]), reversed(starts), strict=True):
            if start is not None:
                fresh += 0 if shown.link is not None and shown.digest in seen else end - start
                end = start
        return fresh

    # --- afterwards ---------------------------------------------------------

    def record(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> None:
        """Remembers a finished generation.

        Args:
            answer: the assistant turn as the client got it.
            tokens: as generated, the end-of-turn token included.
        """
        turn = prepared.turn
        if turn is None or not tokens:
            return
        healed = self._healing.put(turn.parent, answer)
        record = self._record_of(turn)
        replaces = turn.base[0] if turn.base is not None else None
        found = self._turns.find(turn.chain, [None] * len(turn.chain), turn.view.tools)
        if found is not None and found[2] == len(turn.chain) and found[1].tokens == record.tokens:
            replaces, record, _ = found
        generation = _generation(answer, tokens)
        if self._faithful(answer, generation):
            record = with_generation(record, generation)
        record_id, gone = self._turns.put(record, replaces)
        names = self._tools.learn(tool.name for tool in turn.view.tools)
        self._count(turn, self._guesses.seen(prepared.session, turn.chain, turn.coded.tokens))
        if self._store is not None:
            self._store.save_record(record_id, record, gone)
            if healed is not None:
                self._store.save_healing(turn.parent, *healed)
            if names is not None:
                self._store.save_tools(names)

    def predict(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> Prompt | None:
        """The prefix that this client's next request will probably have, the answer included.

        None where that is computed already, where nothing can be said, and for a client whose last guesses were wrong.
        """
        turn = prepared.turn
        if turn is None or not tokens:
            return None
        kept = [shown.message for shown in turn.view.shown if not shown.transient]
        transient = [shown.message for shown in turn.view.shown[-1:] if shown.transient]
        try:
            expected = [*kept, answer, *followers(answer, transient)]
            rendered = self._renderer.render(expected, turn.view.tools, turn.variables)
        except BadRequest:
            return None
        generation = _generation(answer, tokens)
        record = with_generation(self._record_of(turn), generation)
        match = record.generation(len(turn.chain), generation.key) if self._faithful(answer, generation) else None
        opened, generated = match if match is not None else (None, None)
        coded = self._coder.code(rendered.text, record, opened, generated)
        end = coded.token_at(known_until(rendered.text))
        guess = coded.tokens[:end]
        computed = (*turn.coded.tokens, *tokens[:-1])
        worth = self._guesses.made(prepared.session, turn.chain, guess)
        if not worth or end <= turn.coded.token_at(rendered.head) or guess[: len(computed)] == computed[:end]:
            return None
        return Prompt(guess, boundaries(coded.anchors, end), coded.token_at(rendered.head), None, end)

    def _record_of(self, turn: Turn) -> Record:
        coded = turn.coded
        base = turn.base[1] if turn.base is not None else None
        opens = inherited_opens(base, coded.shared, coded.common)
        opened = Open(len(turn.chain), turn.rendered.generation, len(coded.tokens))
        opens = tuple(o for o in opens if o.depth < opened.depth)
        return Record(
            shown=turn.view.shown,
            chain=turn.chain,
            tools=turn.view.tools,
            text=turn.rendered.text,
            tokens=coded.tokens,
            anchors=coded.anchors,
            opens=(*opens, opened),
            clock=turn.clock.moment if turn.clock is not None else None,
        )

    # --- figures ------------------------------------------------------------

    def _count(self, turn: Turn, guessed: bool | None) -> None:
        counters = self._counters
        counters.add("healed_turns", turn.healed)
        counters.add("notes", bool(turn.view.notes))
        if guessed is not None:
            counters.add("guesses_right" if guessed else "guesses_wrong")
        if turn.base is not None:
            _, record, depth = turn.base
            counters.add("exact_key_rejected_by_model_lcp", rejected(record, depth, turn.view, turn.coded))

    def counters(self) -> Mapping[str, int]:
        """Totals of finished requests since the start, and how many turn records are held now.

        ``exact_key_rejected_by_model_lcp``: see `counters.rejected`. ``healed_turns``: assistant turns, each counted
        when it comes back first. ``notes``: requests that an update note was added to.
        """
        return {**self._counters.totals(), "records": len(self._turns)}

    def _faithful(self, answer: Message, generation: Generation) -> bool:
        """The tokens say what the client was told, and nothing after it (a stop string cuts what was generated)."""
        text = self._coder.generation_text(generation)
        if answer.content.strip() not in text:
            return False
        return bool(answer.tool_calls) or text.rstrip().endswith(answer.content.rstrip())

    def locate(self, prepared: Prepared, token_index: int) -> Where:
        """Which message and field of the client's request the prompt token `token_index` comes from."""
        turn = prepared.turn
        if turn is None:
            return Where(None, "prompt", None, self._around(prepared.prompt.tokens, token_index))
        text = self._around(prepared.prompt.tokens, token_index)
        char, token, _ = turn.coded.anchor_before(token_index)
        char += len(self._tokenizer.decode(prepared.prompt.tokens[token:token_index]))
        marks = [place for place, _, start in turn.coded.anchors if start]
        return locate(turn.rendered, marks, turn.view.shown, turn.entries, char, text)

    def _around(self, tokens: Sequence[int], index: int) -> str:
        return self._tokenizer.decode(tokens[max(0, index - 8) : index + 8])

    def close(self) -> None:
        """Writes what is waiting to disk; nothing may be recorded after."""
        if self._store is not None:
            self._store.close()


def _generation(answer: Message, tokens: Sequence[int]) -> Generation:
    return Generation(
        key=answer_key(answer.content, answer.tool_calls),
        content=answer.content,
        reasoning=answer.reasoning or "",
        names=tuple(call.name for call in answer.tool_calls),
        tokens=tuple(tokens),
    )


def _session(entries: Sequence[Entry]) -> str:
    """Named after how the conversation begins: its first user message and what stands before it."""
    chosen = ROOT
    for entry in entries:
        if entry.link is not None:
            chosen = entry.link
            if entry.message.role == "user":
                break
    return f"auto-{chosen.hex()[:24]}"


__all__ = ["Pipeline", "Prepared", "Where"]
