"""Turn records: what was shown to the model before, found again by the canonical chain.

Records are immutable. The memory of them is shared by the HTTP threads and has its own lock.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from start_llm.core.messages import Message, Tool
from start_llm.prompt.canonical import body_links

Anchor = tuple[int, int, bool]
"""Character offset in the text, token offset in the tokens, whether a message begins there."""
Told = tuple[str, str]
"""A slot (which field of which message, which tool) and the value that the model was told for it."""
_MAX_OPENS = 16


@dataclass(frozen=True, slots=True)
class Shown:
    """A message as the model saw it.

    Attributes:
        message: its bytes, an update note included.
        link: the chain's hash after it, or None if its canonical form is empty.
        told: what it told the model, the note's contents included.
        transient: it is gone in the next request.
        digest: of its canonical form.
    """

    message: Message
    link: bytes | None
    told: tuple[Told, ...] = ()
    transient: bool = False
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer. `tokens` are as generated, the end-of-turn token included."""

    key: bytes
    content: str
    reasoning: str
    names: tuple[str, ...]
    tokens: tuple[int, ...]

    def shown_in(self, text: str) -> bool:
        """All that the answer says stands in `text`: its reasoning, its text and the names it calls."""
        wanted = (self.reasoning.strip(), self.content.strip(), *self.names)
        return all(part in text for part in wanted)


@dataclass(frozen=True, slots=True)
class Open:
    """A place where the model was asked to speak.

    Attributes:
        depth: messages of the chain before it.
        char: where its generation prompt begins in the record's text.
        end: tokens of the record before the answer, the generation prompt included.
        generations: what the model said there, the newest last.
    """

    depth: int
    char: int
    end: int
    generations: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A served prompt.

    Attributes:
        shown: its messages as the model saw them.
        chain: the chain's hash after each message that counts.
        tools: as rendered, in that order.
        text: the template's rendering of it, the generation prompt included.
        tokens: the prompt's tokens; generated turns in it are as generated.
        opens: places where the model spoke, the record's own one last.
        clock: local time at which the template's own date stands, if it prints one.
    """

    shown: tuple[Shown, ...]
    chain: tuple[bytes, ...]
    tools: tuple[Tool, ...]
    text: str
    tokens: tuple[int, ...]
    anchors: tuple[Anchor, ...]
    opens: tuple[Open, ...]
    clock: datetime | None = None

    @property
    def head(self) -> int:
        """Messages that count at its front whose role is system."""
        return head_size([shown.message for shown in self.shown if shown.link is not None])

    def body(self) -> list[bytes]:
        """The chain without the head: what stays the same when a client changes its system text."""
        return body_links(self.head, [shown.digest for shown in self.shown if shown.link is not None][self.head :])

    @property
    def size(self) -> int:
        """Roughly its memory, in bytes."""
        generated = sum(len(g.tokens) for o in self.opens for g in o.generations)
        return sys.getsizeof(self.text) + 36 * (len(self.tokens) + generated) + 120 * len(self.anchors) + 400

    def open_at(self, depth: int) -> Open | None:
        return next((opened for opened in reversed(self.opens) if opened.depth == depth), None)

    def generation(self, depth: int, key: bytes | None) -> tuple[Open, Generation] | None:
        """The answer after `depth` messages with this key."""
        opened = self.open_at(depth) if key is not None else None
        if opened is None:
            return None
        match = next((g for g in reversed(opened.generations) if g.key == key), None)
        return (opened, match) if match is not None else None


def head_size(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with."""
    return next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))


def with_generation(record: Record, generation: Generation) -> Record:
    """The record with one more answer at its end."""
    last = record.opens[-1]
    kept = tuple(g for g in last.generations if g.tokens != generation.tokens)[-7:]
    return replace(record, opens=(*record.opens[:-1], replace(last, generations=(*kept, generation))))


def inherited_opens(base: Record | None, shared: int, common: int) -> tuple[Open, ...]:
    """Places of `base` that a new prompt still goes through, so that its other answers are found again.

    `shared` tokens and `common` characters are the same in both.
    """
    if base is None:
        return ()
    return tuple(o for o in base.opens[-_MAX_OPENS:] if o.end <= shared and o.char <= common)


class TurnMemory:
    """Records by the chain, least recently used first out, bounded by bytes. Thread-safe."""

    def __init__(self, limit_bytes: int = 256 * 2**20) -> None:
        self._limit = limit_bytes
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._index: dict[bytes, tuple[int, ...]] = {}
        self._bodies: dict[bytes, tuple[int, ...]] = {}
        self._next = 0
        self._used = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        return self._used

    def records(self) -> Iterator[tuple[int, Record]]:
        with self._lock:
            return iter(list(self._records.items()))

    def find(
        self, chain: Sequence[bytes], keys: Sequence[bytes | None], tools: Sequence[Tool]
    ) -> tuple[int, Record, int] | None:
        """The record that shares the deepest part of `chain`: its id, itself, the depth.

        Of several, one that generated the next message is preferred (`keys`: the identity of each message of the chain
        if it is an assistant turn), then one with the same tools, then the newest.
        """
        return self._find(self._index, 0, chain, keys, tools)

    def find_body(
        self, head: int, body: Sequence[bytes], keys: Sequence[bytes | None], tools: Sequence[Tool]
    ) -> tuple[int, Record, int] | None:
        """As `find`, by the chain without its `head` system messages, which may be others in the record.

        `keys` and the depth are those of the whole chain.
        """
        return self._find(self._bodies, head, body, keys, tools)

    def _find(
        self,
        index: dict[bytes, tuple[int, ...]],
        head: int,
        chain: Sequence[bytes],
        keys: Sequence[bytes | None],
        tools: Sequence[Tool],
    ) -> tuple[int, Record, int] | None:
        with self._lock:
            for end in range(len(chain), 0, -1):
                ids = index.get(chain[end - 1])
                if not ids:
                    continue
                depth = head + end
                key = keys[depth] if end < len(chain) else None
                best = max(ids, key=lambda i: self._rank(i, depth, key, tools))
                self._records.move_to_end(best)
                return best, self._records[best], depth
        return None

    def result_after(self, parent: bytes, call: str | None) -> bytes | None:
        """The digest of the tool result that came behind the chain's `parent` and answered `call`.

        None if several did: then it cannot be told which one this conversation had.
        """
        found = set()
        with self._lock:
            for record_id in self._index.get(parent, ()):
                record = self._records[record_id]
                place = record.chain.index(parent) + 1
                shown = next(itertools.islice((s for s in record.shown if s.link is not None), place, None), None)
                if shown is not None and shown.message.role == "tool" and shown.message.tool_call_id == call:
                    found.add(shown.digest)
        return found.pop() if len(found) == 1 else None

    def _rank(self, record_id: int, depth: int, key: bytes | None, tools: Sequence[Tool]) -> tuple[bool, bool, int]:
        record = self._records[record_id]
        spoke = record.generation(depth, key) is not None
        return spoke, _same_tools(record.tools, tools), record_id

    def restore(self, records: Sequence[tuple[int, Record]], next_id: int) -> None:
        """Takes over records from disk under their ids, oldest first; only into an empty memory."""
        with self._lock:
            self._next = max(next_id, self._next)
            for record_id, record in records:
                self._add(record_id, record)

    def put(self, record: Record, replaces: int | None = None) -> tuple[int, list[int]]:
        """Keeps a record; returns its id and the ids that are gone.

        `replaces` is dropped if the record strictly extends it, or is the same prompt with more answers.
        """
        with self._lock:
            gone: list[int] = []
            old = self._records.get(replaces) if replaces is not None else None
            if replaces is not None and old is not None and _supersedes(record, old):
                gone.append(replaces)
                self._drop(replaces)
            record_id = self._next
            self._next += 1
            self._add(record_id, record)
            while self._used > self._limit and len(self._records) > 1:
                oldest = next(iter(self._records))
                gone.append(oldest)
                self._drop(oldest)
            return record_id, gone

    def _add(self, record_id: int, record: Record) -> None:
        self._records[record_id] = record
        self._used += record.size
        for index, links in ((self._index, record.chain), (self._bodies, record.body())):
            for link in links:
                index[link] = (*index.get(link, ()), record_id)[-8:]

    def _drop(self, record_id: int) -> None:
        record = self._records.pop(record_id)
        self._used -= record.size
        for index, links in ((self._index, record.chain), (self._bodies, record.body())):
            for link in links:
                left = tuple(i for i in index.get(link, ()) if i != record_id)
                if left:
                    index[link] = left
                else:
                    index.pop(link, None)


def _supersedes(new: Record, old: Record) -> bool:
    """`new` extends `old`, or is the same prompt with more answers."""
    if new.chain[: len(old.chain)] != old.chain or not _same_tools(new.tools, old.tools):
        return False
    return len(new.chain) > len(old.chain) or new.tokens == old.tokens


def _same_tools(a: Sequence[Tool], b: Sequence[Tool]) -> bool:
    return len(a) == len(b) and {tool.name: tool for tool in a} == {tool.name: tool for tool in b}
