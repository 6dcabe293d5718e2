"""One request's way from messages to tokens. The page to read first in this room.

`compose` makes the prompt, with the conversation tree (`tree`) as the one memory. Afterwards the turn is recorded and
the next request is guessed. `docs/prompt.md` tells the walk with an example.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from start_llm.core.errors import BadRequest, ContextLengthExceeded
from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest, begun_by_client
from start_llm.core.settings import Settings
from start_llm.prompt.clients import Clients
from start_llm.prompt.compose import Composer
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.locate import locate
from start_llm.prompt.plain import PlainTokens
from start_llm.prompt.predict import NEXT, Guesses, followers, known_until
from start_llm.prompt.prepared import Prepared
from start_llm.prompt.probe import probe
from start_llm.prompt.reading import leading_systems
from start_llm.prompt.tokenise import Eyes
from start_llm.prompt.traits import Traits
from start_llm.prompt.tree import ConversationTree, Path, definition, extended
from start_llm.prompt.turndb import TurnDB

_MISS_SLACK_TOKENS = 16
COUNTERS = ("healed_turns", "notes", "shown_as_sent", "guesses_right", "guesses_wrong")
"""``healed_turns``: answers that came back without their reasoning or otherwise written. ``notes``: requests that an
update note was added to. ``shown_as_sent``: requests with a history that went on from no answer of this server.
``guesses_*``: what re-anchoring expected of a client's next request."""


class Pipeline:
    """Turns requests into prompts and remembers what was shown. All methods may be called from any thread."""

    def __init__(
        self,
        template: HFTemplate,
        tokenizer: HFTokenizer,
        *,
        settings: Settings,
        clients: Clients | None = None,
        store: TurnDB | None = None,
        now: Callable[[], datetime] = datetime.now,
        context: int = 0,
        eyes: Eyes | None = None,
        traits: Traits | None = None,
    ) -> None:
        """Reads what `store` holds for the template. Raises TemplateError: it cannot render one user message.

        `now` tells the local time. `context`: tokens that a prompt and its answer may have, 0 if there is no limit.
        `eyes`: of a model that sees images. `traits`: of the template; it is probed where nobody knows them.
        """
        self._tokenizer = tokenizer
        self.traits = probe(template, tokenizer) if traits is None else traits
        self._tree = ConversationTree()
        self._composer = Composer(
            template,
            tokenizer,
            self.traits,
            self._tree,
            settings=settings,
            clients=clients or Clients(),
            now=now,
            context=context,
            eyes=eyes,
        )
        self._plain = PlainTokens(self._composer.renderer, self._composer.coder)
        self._guesses = Guesses()
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._totals_lock = threading.Lock()
        self._store = store
        if store is not None:
            policy = "strict" if self._composer.strict else "append"
            nodes = store.load(f"{self.traits.fingerprint}-{policy}")
            self._tree.restore(nodes)
            for node in nodes:
                self._composer.sent.add_answer(node)

    # --- request ------------------------------------------------------------

    def prepare(self, request: ChatRequest, *, thinking: bool) -> Prepared:
        """Makes the prompt. Leaves no trace: `sent` says that it was used.

        Raises BadRequest, or ContextLengthExceeded where it is so long that not even its tokens are counted.
        """
        if request.prompt is not None:
            return self._composer.raw(request, self._raw_tokens(request.prompt))
        if not request.messages:
            raise BadRequest("messages is empty; at least one message is needed", param="messages")
        self._composer.length.check([message.content for message in request.messages])
        request = begun_by_client(request)
        query = self._composer.read(request, thinking=thinking and not request.begun)
        return self._composer.compose(query)

    def _raw_tokens(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._composer.length.check((prompt,))
            prompt = tuple(self._tokenizer.encode_raw(prompt))
        if not prompt:
            raise BadRequest("prompt is empty; at least one token is needed", param="prompt")
        return prompt

    def sent(self, prepared: Prepared) -> set[int]:
        """The request is on its way to the engine: from now on its tokens are no new ones for its owner.

        Returns what `ended_early` is to be given if the request ends before its prompt is computed.
        """
        return self._composer.sent.add(prepared.request.owner, prepared.chain, prepared.view, prepared.rendering)

    def ended_early(self, prepared: Prepared, fresh: set[int], computed: int) -> None:
        """Only the first `computed` tokens of the prompt are there: when it is sent again, the rest is new."""
        end = computed if prepared.raw else self._char_at(prepared, computed)
        self._composer.sent.take_back(prepared.request.owner, prepared.rendering, fresh, end)

    # --- afterwards ---------------------------------------------------------

    def record(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> None:
        """Remembers an answer as the client got it; `tokens` as generated, the end-of-turn token included."""
        if prepared.raw:
            return
        self.sent(prepared)
        self._count(prepared, self._guesses.seen(prepared))
        # Every turn that says nothing says the same.
        if tokens and (answer.content.strip() or answer.tool_calls):
            path = self._path_of(prepared, answer, tokens)
            self._composer.sent.add_answer(path.node)
            node = self._tree.add(path.node, path)
            if self._store is not None and node is path.node:
                self._store.save(node)

    def predict(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> Prompt | None:
        """What this client will probably send: the prefix of its next request, the answer included, or the head of the
        conversation as it is sent now.

        None where that is computed already, where nothing can be said, and for a client whose last guesses were wrong.
        """
        if prepared.raw or not tokens:
            return None
        try:
            return self._next(prepared, answer, tokens) or self._head(prepared)
        except BadRequest:
            return None

    def _next(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> Prompt | None:
        view = prepared.view
        transient = [view.messages[-1]] if view.transient else []
        kept = view.messages[: len(view.messages) - len(transient)]
        whole = prepared.whole(answer)
        expected = [*kept, whole, *followers(whole, transient)]
        text = self._composer.renderer.render(expected, view.tools, dict(prepared.variables))
        path = self._path_of(prepared, answer, tokens)
        rendering = self._composer.coder.code(text, path, answered=not self._composer.strict)
        end = rendering.anchor_at(known_until(rendering.text)).token
        guess = rendering.tokens[:end]
        computed = (*prepared.rendering.tokens, *tokens[:-1])
        good = self._guesses.made(prepared, guess)
        head = rendering.anchor_at(rendering.head).token
        if not good or end <= head or guess[: len(computed)] == computed[:end]:
            return None
        images = self._composer.spans(prepared.request, replace(rendering, tokens=guess))
        if images is None:
            return None
        return Prompt(guess, rendering.boundaries(end), head, None, end, images)

    def _head(self, prepared: Prepared) -> Prompt | None:
        """How the conversation begins as it is sent now (system text, tools, a client's blocks), where it is shown
        otherwise: what follows a summary begins so."""
        base, entries, request = prepared.view.base, prepared.chain.entries, prepared.request
        lead = leading_systems(request.messages)
        if base is None or lead == len(entries):
            return None
        first, tools = entries[lead], self._tree.arrange(request.owner, request.tools)
        blocks = (part.end for part in first.facts.parts if part.rule.place == "start")
        begins = first.message.content[: max(blocks, default=0)]
        messages = [*(entry.facts.shown for entry in entries[:lead]), Message("user", begins + NEXT)]
        if not self._guesses.stays(prepared, (*(one.content for one in messages), *map(definition, tools))):
            return None
        text = self._composer.renderer.render(messages, tools, dict(prepared.variables))
        known = text.text[: known_until(text.text)]
        if base.rendering.text.startswith(known):
            return None
        rendering = self._composer.coder.code(text, None)
        char, token, _ = rendering.anchor_at(len(known))
        # The last tokens of a block may be others with what follows it.
        end = token + max(0, self._composer.count_tokens(known[char:]) - 2 * bool(begins))
        head = rendering.anchor_at(rendering.head).token
        return Prompt(rendering.tokens[:end], rendering.boundaries(end), head, None, end) if end else None

    def plain(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens that a router may make of the conversation up to and with `answer` (`PlainTokens.of`); none if it
        cannot."""
        if prepared.raw:
            return [(*prepared.prompt.tokens, *tokens)]
        try:
            return self._plain.of(prepared, prepared.whole(answer))
        except (BadRequest, ContextLengthExceeded):
            return []

    def _path_of(self, prepared: Prepared, answer: Message, tokens: Sequence[int]) -> Path:
        """The conversation with this answer at its end."""
        says = not self._composer.strict and self._composer.coder.says(
            tuple(tokens), answer.content, bool(answer.tool_calls)
        )
        spoken = " ".join([answer.content, *(call.arguments for call in answer.tool_calls)])
        count = self._composer.count_tokens(spoken)
        whole = prepared.whole(answer)
        node = prepared.node_of(whole, tokens if says else (), count, keep=not self._composer.strict)
        return extended(prepared.stem, node, prepared.rendering)

    # --- figures ------------------------------------------------------------

    def _count(self, prepared: Prepared, guessed: bool | None) -> None:
        with self._totals_lock:
            self._totals["notes"] += bool(prepared.notes)
            self._totals["shown_as_sent"] += prepared.view.base is None and len(prepared.chain.keys) > 1
            self._totals["healed_turns"] += prepared.heals()
            if guessed is not None:
                self._totals["guesses_right" if guessed else "guesses_wrong"] += 1

    def counters(self) -> dict[str, int]:
        """Totals since the start, for metrics: see `COUNTERS`; `records` is how many answers are remembered."""
        with self._totals_lock:
            return {**self._totals, "records": len(self._tree)}

    def explain(self, report: CacheReport, prepared: Prepared) -> CacheReport:
        """Completes the engine's report with what only this side knows: what was new, and where a miss lies."""
        if prepared.miss is not None and prepared.miss.reason == "flattened":  # though its words are new in that place
            return replace(report, new=prepared.new, miss=prepared.miss)
        if report.miss is None or report.computed <= prepared.new + _MISS_SLACK_TOKENS:
            return replace(report, new=prepared.new, miss=None)
        miss = self.locate(prepared, report.miss)
        if prepared.miss is not None and miss.reason not in ("evicted", "store_error"):
            miss = replace(prepared.miss, token=miss.token, found=miss.found)
        return replace(report, new=prepared.new, miss=miss)

    def locate(self, prepared: Prepared, miss: Miss) -> Miss:
        """The same with words of the request: which message and field its token is from, and what stands there."""
        miss = replace(miss, found=self._around(prepared.prompt.tokens, miss.token), stored=())
        if prepared.raw:
            return replace(miss, field="prompt")
        rendering = prepared.rendering
        # A turn record outlives its KV: these very tokens were served, and what is stored does not hold them any more.
        if miss.token < rendering.taken and miss.reason in ("diverged", "first_turn"):
            miss = replace(miss, reason="evicted")
        return locate(prepared, miss, self._char_at(prepared, miss.token))

    def _char_at(self, prepared: Prepared, index: int) -> int:
        """The character of the prompt's text at which its token `index` begins."""
        char, token, _ = prepared.rendering.anchor_before(index)
        return char + len(self._tokenizer.decode(prepared.prompt.tokens[token:index]))

    def text_at(self, prepared: Prepared, index: int, tokens: Sequence[int]) -> str:
        """The end of the prompt's text up to its token `index`, and `tokens` behind it."""
        return self._around((*prepared.prompt.tokens[:index], *tokens), index)

    def _around(self, tokens: Sequence[int], index: int) -> str:
        return self._tokenizer.decode(tokens[max(0, index - 8) : index + 8])

    def close(self) -> None:
        """Writes what is waiting to disk; nothing may be recorded after."""
        if self._store is not None:
            self._store.close()
