"""A conversation of `test_belongs`: what its client remembers, what it sends, and what may truly be known of it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.request import ChatRequest
from tests.prompt.belongs_clients import (
    ANSWERS,
    BILLING,
    CLEARED,
    FILE_NAMES,
    FILES,
    FILES_REPLY,
    OUTPUTS,
    ROLE,
    SYSTEM,
    TOOL_NAMES,
    TOOL_TEXTS,
    TOOLS,
    TRANSIENT,
    Kind,
    Place,
    files_text,
    fill,
    private_words,
    typed_texts,
)
from tests.prompt.client import request as request_of

SHARED = ("alpha", "beta", "gamma", "delta")


@dataclass(frozen=True)
class Said:
    """A message of a conversation. `made`: what the server generated there, None where it did not.

    `number` is its own within the conversation; the places in it are named by that. `block`: it says nothing else.
    `edited`: what stood there before the client changed a call of it.
    """

    number: int
    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    reasoning: str | None = None
    made: Made | None = None
    cleared: bool = False
    block: bool = False
    edited: Said | None = None

    def matches(self, other: Said) -> bool:
        """The same but for what stands in declared places."""
        if self.role == "tool" == other.role and (self.cleared or other.cleared):
            return True
        if self.role != other.role or self.text.strip() != other.text.strip() or len(self.calls) != len(other.calls):
            return False
        pairs = zip(self.calls, other.calls, strict=True)
        return all(a.name == b.name and arguments_of(a) == arguments_of(b) for a, b in pairs)


def arguments_of(call: ToolCall) -> str:
    """Equal for equal JSON values: `false` is not 0."""
    return json.dumps(json.loads(call.arguments), sort_keys=True)


@dataclass(frozen=True, eq=False)
class Made:
    """An answer that the server generated and recorded.

    Attributes:
        sent: what it answers.
        answer: as generated, reasoning included.
        declared: private words that its prompt may have shown and that later ones may show again.
    """

    sent: Sent
    answer: Message
    declared: frozenset[str]

    @property
    def history(self) -> tuple[Said, ...]:
        return self.sent.history


@dataclass(frozen=True)
class Sent:
    """A request, and what its messages are.

    Attributes:
        said: for every message of the request the one of the conversation, None for system text, files, transient.
        values: what stands in declared places; earlier: other values that stood there before.
        stamps: places that need not be told as gone.
        blocks: all that messages of a block only have ever said.
    """

    request: ChatRequest
    kind: Kind
    said: tuple[Said | None, ...]
    values: Mapping[Place, str | None]
    earlier: Mapping[Place, tuple[str, ...]]
    stamps: frozenset[Place]
    transient: str | None
    blocks: frozenset[str]

    @property
    def history(self) -> tuple[Said, ...]:
        """Without messages of declared blocks only: they come and go as these do."""
        return tuple(said for said in self.said if said is not None and not said.block)


@dataclass
class Words:
    """Gives a conversation its own words."""

    tag: str
    count: int = 0

    def new(self) -> str:
        self.count += 1
        return f"{self.tag}{self.count % 1000:03}"

    def new_id(self, ours: bool = True) -> str:
        """A call's id as this server makes them, or as others do."""
        drawn = hashlib.sha256(self.new().encode()).hexdigest()[:24]
        return f"call_{drawn}" if ours else f"toolu_{drawn[:10].upper()}"


@dataclass
class Conversation:
    """One client's conversation.

    Attributes:
        words: for values and texts; conversations of one group that are equal word for word have the same here.
        own: for what only this conversation has in any case: call ids and the model's hidden reasoning.
        private: values are words of its own, else of a small vocabulary.
        echo: how the client writes an answer down.
        toolless: its tools are not sent now.
    """

    kind: Kind
    words: Words
    own: Words
    private: bool
    echo: Callable[[Message], Message]
    thinking: bool = True
    session: str | None = None
    owner: str | None = None
    history: list[Said] = field(default_factory=list)
    values: dict[Place, str | None] = field(default_factory=dict)
    earlier: dict[Place, list[str]] = field(default_factory=dict)
    stamps: set[Place] = field(default_factory=set)
    numbers: int = 0
    ticks: int = 36_000
    toolless: bool = False

    def __post_init__(self) -> None:
        if not self.values:
            for label in ("time", "mode", "customer"):
                self.set(Place(SYSTEM, label))
            if self.kind.name == "aider":
                self.set(Place(FILES, FILE_NAMES[0]))
            else:
                for name in TOOL_NAMES[:2]:
                    self.set(Place(TOOLS, name))

    # --- what a client does to its history ------------------------------------

    def fork(self, own: Words) -> Conversation:
        """The same conversation so far, going on in its own way. What it says from now on is its own."""
        twin = copy.copy(self)
        twin.own, twin.words = own, Words(own.tag, 500)
        twin.history, twin.values, twin.stamps = list(self.history), dict(self.values), set(self.stamps)
        twin.earlier = {place: list(values) for place, values in self.earlier.items()}
        return twin

    def set(self, place: Place, value: str | None = None) -> None:
        """Puts a new value (or this one) into a place."""
        if value is None:
            name = f"{place.label}{place.where if place.where >= 0 else ''}"
            count = len(self.earlier.get(place, ()))
            value = f"{name}-{self.words.new() if self.private else SHARED[count % len(SHARED)]}"
            if place.label == "clock":
                self.ticks += 1
                value = f"{self.ticks // 3600 % 24:02}:{self.ticks // 60 % 60:02}:{self.ticks % 60:02}"
        self.values[place] = value
        if value not in self.earlier.setdefault(place, []):
            self.earlier[place].append(value)

    def take_away(self, place: Place) -> None:
        if place in self.values:
            self.values[place] = None

    def places(self, where: int | None = None) -> list[Place]:
        """Places in messages that are still there, or those of `where`."""
        if where is not None:
            return [place for place in self.values if place.where == where]
        numbers = {said.number for said in self.history}
        return [place for place in self.values if place.where in numbers]

    def say(self, n: int) -> None:
        """The user types something, or the tools return."""
        last = self.history[-1] if self.history else None
        if last is not None and last.role == "assistant" and last.calls:
            for call in last.calls:
                self._add("tool", fill(OUTPUTS[n % len(OUTPUTS)], self.words.new()), self.kind.result, n, call.id)
        elif last is None or last.role == "assistant":
            texts = typed_texts(self.kind.name)
            self._add("user", fill(texts[n % len(texts)], self.words.new()), self.kind.user, n)

    def _add(self, role: str, text: str, forms: Mapping[str, str], n: int, call_id: str | None = None) -> None:
        self.numbers += 1
        self.history.append(Said(self.numbers, role, text, call_id=call_id))
        for index, label in enumerate(forms):
            if (n + self.numbers + index) % 3 == 0:
                place = Place(self.numbers, label)
                self.set(place)
                if label in self.kind.stamps:
                    self.stamps.add(place)

    def hear(self, made: Made) -> None:
        """Writes an answer down in the client's way."""
        kept = self.echo(made.answer)
        self.numbers += 1
        said = Said(self.numbers, "assistant", kept.content, kept.tool_calls, reasoning=kept.reasoning, made=made)
        self.history.append(said)

    def drop_from(self, index: int) -> None:
        del self.history[index:]

    def answer(self, n: int) -> Message:
        """What the model says to the request that was made last: words by `n`, thoughts and ids of this moment."""
        text = fill(ANSWERS[n % len(ANSWERS)], self.words.new())
        calls: tuple[ToolCall, ...] = ()
        if n % 3 == 0 and self.kind.name != "aider":
            count = 1 + (n % 6 == 3 and n % 4 == 1)
            calls = tuple(self._call(index, n) for index in range(count))
            text = "" if n % 2 else text
        reasoning = f"Let me think about {self.own.new()} first." if self.thinking and n % 4 != 3 else None
        return Message("assistant", text, reasoning, calls)

    def _call(self, index: int, n: int) -> ToolCall:
        path = f"src/{self.words.new()}.py" if n % 2 else "src/calc.py"
        return ToolCall(self.own.new_id(), TOOL_NAMES[index], json.dumps({"path": path, "limit": 20 + index}))

    # --- what it sends ----------------------------------------------------------

    def sent(self) -> Sent:
        """The request as this client writes it now."""
        pairs: list[tuple[Message, Said | None]] = [(Message("system", self._system()), None)]
        aside = files_text(self.values) if self.kind.name == "aider" else None
        for index, said in enumerate(self.history):
            if aside is not None and index == self._files_index():
                pairs += [(Message("user", aside), None), (Message("assistant", FILES_REPLY), None)]
            if not said.block or self.values.get(self._block(said)) is not None:
                pairs.append((self._message(said), said))
        transient = None
        if self.kind.name == "openclaw":
            transient = self.words.new()
            pairs.append((Message("user", TRANSIENT.format(f"Active sessions: {transient}")), None))
        messages, who = [message for message, _ in pairs], {"session": self.session, "owner": self.owner}
        request = request_of(messages, tuple(self._tools()), **who)
        carried = self._carried()
        earlier = {
            place: tuple(value for value in values if value != carried.get(place))
            for place, values in self.earlier.items()
        }
        said_of = tuple(said for _, said in pairs)
        return Sent(request, self.kind, said_of, carried, earlier, frozenset(self.stamps), transient, self._blocks())

    def _block(self, said: Said) -> Place:
        assert self.kind.alone is not None
        return Place(said.number, self.kind.alone)

    def _blocks(self) -> frozenset[str]:
        places = [self._block(said) for said in self.history if said.block]
        forms = ((place, value) for place in places for value in self.earlier.get(place, ()))
        return frozenset(self.kind.user_text("", place.where, {place: value}).strip() for place, value in forms)

    def say_block(self, index: int) -> None:
        """A message of a declared block only, at this place of the history."""
        self.numbers += 1
        said = Said(self.numbers, "user", "", block=True)
        self.history.insert(index, said)
        self.set(self._block(said))

    def _files_index(self) -> int:
        """The files stand in front of the newest user message."""
        return max((i for i, said in enumerate(self.history) if said.role == "user"), default=0)

    def _carried(self) -> dict[Place, str | None]:
        numbers = {said.number for said in self.history if not said.cleared}
        hidden = {TOOLS} if self.toolless else set()
        hidden |= {SYSTEM} if self.values.get(ROLE) is not None else set()
        return {
            place: None if place.where in hidden and place != ROLE else value
            for place, value in self.values.items()
            if place.where < 0 or place.where in numbers
        }

    def _system(self) -> str:
        text = self.kind.system_text(self.values)
        return text.replace(BILLING, BILLING.format(self.words.new())) if self.kind.name == "claude" else text

    def _message(self, said: Said) -> Message:
        if said.role == "system":
            return Message("system", said.text)
        if said.role == "assistant":
            return Message("assistant", said.text, said.reasoning, said.calls)
        if said.role == "tool":
            text = CLEARED if said.cleared else self.kind.result_text(said.text, said.number, self.values)
            return Message("tool", text, tool_call_id=said.call_id)
        return Message("user", self.kind.user_text(said.text, said.number, self.values))

    def _tools(self) -> Iterator[Tool]:
        for place, value in self.values.items():
            if place.where == TOOLS and value is not None and not self.toolless:
                schema = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
                yield Tool(place.label, TOOL_TEXTS[place.label].format(value), schema)


def imported(conversation: Conversation, own: Words, same_values: bool, ours: bool) -> Conversation:
    """A client that was never served here and has the same words in its history: no thoughts, ids of its own.

    `ours`: another server of this kind made the ids.
    """
    twin = Conversation(conversation.kind, Words(own.tag, 500), own, True, conversation.echo, conversation.thinking)
    names: dict[str, str] = {}
    for said in conversation.history:
        calls = tuple(replace(call, id=names.setdefault(call.id, own.new_id(ours))) for call in said.calls)
        call_id = names.get(said.call_id, said.call_id) if said.call_id else None
        unserved = replace(said, reasoning=None, made=None, cleared=False, edited=None)
        twin.history.append(replace(unserved, calls=calls, call_id=call_id))
    twin.numbers = conversation.numbers
    if same_values:
        twin.values, twin.stamps = dict(conversation.values), set(conversation.stamps)
        twin.earlier = {place: [value] for place, value in twin.values.items() if value is not None}
    return twin


def declared_words(sent: Sent) -> set[str]:
    """Private words of the request's declared places."""
    return private_words(" ".join(value for value in sent.values.values() if value is not None))
