"""Runs a story of `test_belongs`: many conversations at one server, every prompt is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from start_llm.core.errors import ContextLengthExceeded
from start_llm.prompt.clients import Clients
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.prepared import Prepared
from start_llm.prompt.turndb import TurnDB
from tests.memory_folder import memory_folder
from tests.prompt.belongs_checks import Truth, fits, problems, remembered, seen
from tests.prompt.belongs_clients import KINDS
from tests.prompt.belongs_conversation import Conversation, Made, Sent, Words
from tests.prompt.belongs_events import EVENTS
from tests.prompt.belongs_model import remembering
from tests.prompt.belongs_reading import texts_of
from tests.prompt.belongs_story import ECHOES, NAMES, Group, Step, Story
from tests.prompt.client import raw_answer, settings
from tests.prompt.models import EOS

CONVERSATIONS = 8


Spoil = Callable[[Sent, str], str]
"""What a prompt's text is taken for: as it is, or with a defect that the properties must find."""


def as_it_is(sent: Sent, text: str) -> str:
    return text


class Broken(AssertionError):
    """A prompt does not have a property."""


@dataclass
class World:
    story: Story
    folder: Path
    spoil: Spoil = as_it_is
    figures: Counter[str] = field(default_factory=Counter)
    conversations: list[Conversation] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        story = self.story
        self.truth = Truth(story.family, story.policy, story.context)
        self.server = self._started(self.folder)
        self.tag_count = 0
        self.members: list[list[Conversation]] = []
        for group in story.groups:
            tag = self.tag()
            made = [self._member(group, tag, number) for number in range(group.size)]
            self.members.append(made)
            self.conversations += made

    def _started(self, folder: Path) -> Pipeline:
        """A server; one that is started anew with the same folder finds what it wrote."""
        parts: dict[str, Any] = {"clients": Clients.load(None), "store": TurnDB(folder / "turns.sqlite")}
        own = settings(cache_drift_policy=self.story.policy)
        return Pipeline(*remembering(self.story.family), settings=own, context=self.story.context, **parts)

    def tag(self) -> str:
        self.tag_count += 1
        n = self.tag_count
        return "q" + "".join(chr(ord("a") + n // 26**i % 26) for i in range(3))

    def _member(self, group: Group, tag: str, number: int) -> Conversation:
        own = Words(self.tag())
        words = Words(self.tag()) if group.private else Words(tag)
        session, key = NAMES[group.names]
        made = Conversation(KINDS[group.kind], words, own, group.private, ECHOES[group.echo], group.thinking)
        made.session = f"{session}{number}" if session else None
        made.owner = key if key == "backend" else f"{key}{number}" if key else None
        return made

    # --- running ----------------------------------------------------------------

    def run(self) -> None:
        try:
            for step in self.story.steps:
                self._step(step)
        finally:
            self.server.close()

    def _step(self, step: Step) -> None:
        if step.which < 0:
            chosen = self.members[(-1 - step.which) % len(self.members)]
        else:
            chosen = [self.conversations[step.which % len(self.conversations)]]
        name, event = EVENTS[step.event % len(EVENTS)]
        for conversation in chosen:
            number = next(i for i, other in enumerate(self.conversations) if other is conversation)
            self.log.append(f"conversation {number} ({conversation.kind.name}): {name} {step.n}")
            event(self, conversation, step.n)

    def turn(self, conversation: Conversation, n: int) -> None:
        conversation.say(n)
        self.ask(conversation, n)

    def ask(self, conversation: Conversation, n: int, heard: bool = True) -> None:
        sent = conversation.sent()
        self.truth.saw(sent)
        try:
            prepared = self.server.prepare(sent.request, thinking=conversation.thinking)
        except ContextLengthExceeded as error:
            self._refused(sent, conversation, error)
            return
        tokens = prepared.prompt.tokens
        tokenizer = remembering(self.story.family)[1]
        text = self.spoil(sent, tokenizer.decode(tokens))
        prompt = seen(self.truth, sent, text, len(tokens), conversation.thinking)
        wrong = list(problems(self.truth, prompt))
        self._count(prepared, sent, text)
        if wrong:
            raise Broken("\n".join([*wrong, "", "What happened:", *self.log, "", *_sent_lines(sent), "Shown:", text]))
        if not heard:
            return
        answer = conversation.answer(n)
        raw = raw_answer(self.story.family, answer, prepared.rendering.in_reasoning)
        end = tokenizer.special_tokens[EOS[self.story.family][0]]
        self.server.record(prepared, answer, [*tokenizer.encode(raw), end])
        made = Made(sent, answer, remembered(prompt))
        self.truth.made.append(made)
        conversation.hear(made)

    def _refused(self, sent: Sent, conversation: Conversation, error: ContextLengthExceeded) -> None:
        """Right for what is too long as it was sent, and for nothing else."""
        self.figures["refused"] += 1
        if fits(self.truth, sent, conversation.thinking):
            told = [f"(d) what was sent fits: {error}", "What happened:", *self.log, *_sent_lines(sent)]
            raise Broken("\n".join(told))

    def _count(self, prepared: Prepared, sent: Sent, text: str) -> None:
        self.figures["requests"] += 1
        self.figures["notes"] += bool(prepared.notes)
        own = "".join(texts_of(sent.request.messages, sent.request.tools))
        thoughts = (said.made.answer.reasoning for said in sent.history if said.made is not None)
        given = any(thought is not None and thought in text and thought not in own for thought in thoughts)
        self.figures["thoughts given back"] += given

    def add(self, conversation: Conversation) -> None:
        if len(self.conversations) < CONVERSATIONS:
            self.conversations.append(conversation)

    def guess(self, conversation: Conversation, n: int) -> None:
        """What it is told is what a server tells that never saw anybody else."""
        twin = conversation.fork(Words(self.tag()))
        twin.owner = f"guesser{self.tag_count}"
        if n % 3 == 1 and twin.history:
            twin.history[n % len(twin.history)] = replace(twin.history[n % len(twin.history)], text="another guess")
        twin.say(n)
        sent = twin.sent()
        with memory_folder() as folder:
            alone = self._started(folder)
            try:
                told = self._told(self.server, sent, twin.thinking, self.spoil)
                alone_told = self._told(alone, sent, twin.thinking, as_it_is)
            finally:
                alone.close()
        if told != alone_told:
            raise Broken("\n".join([f"(f) a guess is told {told}, by a new server {alone_told}", *self.log]))

    def _told(self, server: Pipeline, sent: Sent, thinking: bool, spoil: Spoil) -> tuple[Any, ...]:
        """All that is told of a request."""
        try:
            made = server.prepare(sent.request, thinking=thinking)
        except ContextLengthExceeded as error:
            return (str(error),)
        text = spoil(sent, remembering(self.story.family)[1].decode(made.prompt.tokens))
        return made.prompt.tokens, text, made.notes, made.new, made.miss, made.rendering

    def restart(self) -> None:
        self.server.close()
        self.server = self._started(self.folder)


def _sent_lines(sent: Sent) -> list[str]:
    lines = [f"Sent (session {sent.request.session}, owner {sent.request.owner}):"]
    for message in sent.request.messages:
        calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
        lines.append(f"  {message.role}: {message.content!r} {message.reasoning or ''!r} {calls or ''}")
    return lines


def tell(story: Story, figures: Counter[str] | None = None, spoil: Spoil = as_it_is) -> None:
    """Runs a story. Raises Broken at the first prompt that does not have the properties."""
    with memory_folder() as folder:
        world = World(story, folder, spoil)
        try:
            world.run()
        finally:
            if figures is not None:
                figures.update(world.figures)
