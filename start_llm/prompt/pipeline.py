"""One request's way from messages to tokens. The page to read first in this room.

`compose` makes the prompt, with the conversation tree (`tree`) as the one memory. Afterwards the turn is recorded and
the next request is guessed. `docs/prompt.md` tells the walk with an example.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.prompt.clients import Clients
from start_llm.prompt.compose import Composer
from start_llm.prompt.counters import PromptCounters
from start_llm.prompt.locate import Where, locate
from start_llm.prompt.ports import Eyes, Template, Tokenizer
from start_llm.prompt.predict import Guesses, followers, known_until
from start_llm.prompt.probe import Traits, probe
from start_llm.prompt.reading import ROOT, MessageChain, answer_digest, call_id
from start_llm.prompt.sights import ImageMarks
from start_llm.prompt.tokenise import boundaries
from start_llm.prompt.tree import ConversationTree, Node, Path, extended, grown
from start_llm.prompt.turn import Prepared, Turn, fresh_tokens, prompt_of
from start_llm.prompt.turndb import TurnDB

_WAIT_SECONDS = 2.0


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
        traits: Traits | None = None,
    ) -> None:
        """Reads what `store` holds for the template; `close` closes the store.

        `now` tells the local time. `context`: tokens that a prompt and its answer may have, 0 if there is no limit.
        `eyes`: of a model that sees images. `traits`: of the template; it is probed where nobody knows them.

        Raises:
            TemplateError: the template cannot render one user message.
        """
        self._strict = settings.cache_drift_policy == "strict" or not settings.cache_canonicalize_tool_context
        self._tokenizer = tokenizer
        self.traits = probe(template, tokenizer) if traits is None else traits
        self._tree = ConversationTree()
        self._composer = Composer(
            template,
            tokenizer,
            self.traits,
            self._tree,
            strict=self._strict,
            preserve_thinking=settings.preserve_thinking,
            clients=clients or Clients(),
            now=now,
            context=context,
            sights=ImageMarks(eyes) if eyes is not None else None,
        )
        self._awaited: dict[bytes, threading.Event] = {}
        self._guesses = Guesses()
        self._counters = PromptCounters()
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
        self._composer.length.check([message.content for message in request.messages])
        variables = self._composer.renderer.variables(
            thinking=thinking, effort=request.reasoning_effort, extra=request.template_kwargs
        )
        reading = self._composer.read(request)
        self._await(reading)
        turn = self._composer.turn(request, reading, variables)
        return Prepared(
            prompt=prompt_of(turn, self._tokenizer),
            in_reasoning=turn.rendered.in_reasoning,
            fresh=fresh_tokens(turn, self._tree),
            session=request.session or _session(turn.reading),
            one_shot=not request.tools and all(message.role != "assistant" for message in request.messages),
            notes=turn.view.notes,
            turn=turn,
        )

    def _completion(self, request: ChatRequest) -> Prepared:
        prompt = request.prompt
        assert prompt is not None
        if isinstance(prompt, str):
            self._composer.length.check((prompt,))
        tokens = tuple(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        if not tokens:
            raise BadRequest("prompt is empty; at least one token is needed", param="prompt")
        session = request.session or "completion"
        return Prepared(Prompt(tokens, generation=len(tokens)), False, len(tokens), session, one_shot=True)

    # --- afterwards ---------------------------------------------------------

    def _await(self, reading: MessageChain) -> None:
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
            rendered = self._composer.renderer.render(expected, turn.view.tools, turn.variables)
        except BadRequest:
            return None
        coded = self._composer.coder.code(rendered.text, self._path_of(turn, answer, tokens), answered=not self._strict)
        end = coded.token_at(known_until(rendered.text))
        guess = coded.tokens[:end]
        computed = (*turn.coded.tokens, *tokens[:-1])
        worth = self._guesses.made(prepared.session, turn.reading.keys, guess)
        if not worth or end <= turn.coded.token_at(rendered.head) or guess[: len(computed)] == computed[:end]:
            return None
        images = self._composer.spans(turn.request, rendered.text, guess)
        if images is None:
            return None
        return Prompt(guess, boundaries(coded.anchors, end), coded.token_at(rendered.head), None, end, images)

    def _path_of(self, turn: Turn, answer: Message, tokens: Sequence[int]) -> Path:
        """The conversation with this answer at its end."""
        view, stem = turn.view, turn.stem
        shown = view.new[:-1] if view.transient else view.new
        says = not self._strict and self._composer.coder.says(tuple(tokens), answer.content, bool(answer.tool_calls))
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
            spoken=turn.spoken + self._composer.count_tokens(spoken),
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


def _said(reading: MessageChain, behind: int) -> tuple[tuple[bytes, ...], tuple[tuple[str, bytes], ...]]:
    """What the links from `behind` on say, and the results of calls among them."""
    links = [reading.entries[index] for index in reading.indices[behind:]]
    results = [entry for entry in links if entry.message.tool_call_id and not entry.cleared]
    return (
        tuple(entry.facts.digest for entry in links),
        tuple((call_id(entry.message.tool_call_id), entry.facts.digest) for entry in results),
    )


def _session(reading: MessageChain) -> str:
    """Named after how the conversation begins: up to its first user message."""
    for key, index in zip(reading.keys, reading.indices, strict=True):
        if reading.entries[index].message.role == "user":
            return f"auto-{key.hex()[:24]}"
    return f"auto-{(reading.keys[-1] if reading.keys else ROOT).hex()[:24]}"


__all__ = ["Pipeline", "Prepared", "Where"]
