"""The conversation tree: the one memory of this room.

A node is an answer that this server generated. It holds what came since its parent's answer: the messages as the model
was shown them, what they and the notes told, the rendered text and its tokens, and the answer as generated. So a node
is as small as its turn. A `Path` is a node with everything before it put together again; the last few are kept.

Nodes are immutable. The tree is shared by the HTTP threads and has its own lock.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import sys
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from functools import cached_property
from itertools import islice, takewhile
from operator import attrgetter, itemgetter
from typing import NamedTuple

from start_llm.core.messages import Message, Tool
from start_llm.core.reasoning_tags import REASONING_TAGS
from start_llm.files.lru import Lru
from start_llm.prompt.reading import Slot, call_id
from start_llm.prompt.textdiff import common_prefix

_CHAR = itemgetter(0)
_PATHS_KEPT = 16
_ALIKE_KEPT = 32


class Difference(IntEnum):
    """What a prompt shows beyond the words of its request, the least harmful first."""

    NONE = 0
    THOUGHTS = 1  # the model's own, which the client has left out, or a block in another place
    TIMES = 2  # an older date or time, and a note with the newer one
    WORDS = 3  # anything else


class SpecialTokenPlace(NamedTuple):
    """A place where a special token stands: offsets in text and tokens, and whether a message begins there."""

    char: int
    token: int
    start: bool


_BEGINNING = SpecialTokenPlace(0, 0, False)


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message as the model saw it, a note included. `place`: its index in the chain, None if it is no link."""

    message: Message
    place: int | None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt as text and, once it is encoded, as tokens."""

    text: str
    generation: int  # character offset at which the generation prompt begins
    head: int = 0  # character offset at which the first message after tools and system begins at the latest, 0: none
    tokens: tuple[int, ...] = ()
    anchors: tuple[SpecialTokenPlace, ...] = ()  # places where a special token stands, ascending
    common: int = 0  # characters of the text that agree with the text of the path that it goes on from
    taken: int = 0  # tokens that were taken over from that path, its answer's included

    @property
    def in_reasoning(self) -> bool:
        """The generation prompt has opened a reasoning block and not closed it."""
        tail = self.text[self.generation :]
        return any(tail.rfind(opened) > tail.rfind(closed) for opened, closed in REASONING_TAGS)

    def anchor_at(self, char: int) -> SpecialTokenPlace:
        """The last anchor at or before `char`; the beginning if there is none."""
        index = bisect_right(self.anchors, char, key=_CHAR)
        return self.anchors[index - 1] if index else _BEGINNING

    def anchor_before(self, token: int) -> SpecialTokenPlace:
        index = bisect_right(self.anchors, token, key=itemgetter(1))
        return self.anchors[index - 1] if index else _BEGINNING

    def boundaries(self, length: int) -> tuple[int, ...]:
        """Token offsets of message starts, ascending, neither 0 nor `length` or more."""
        return tuple(anchor.token for anchor in self.anchors if anchor.start and 0 < anchor.token < length)


@dataclass(frozen=True, slots=True)
class RenderDelta:
    """How a prompt's rendering differs from its parent's prompt with what was generated behind it."""

    chars: int  # so many of that are kept in front of `text`
    tokens: int  # so many in front of `new_tokens`
    anchors: int  # so many in front of `new_anchors`
    text: str
    new_tokens: array[int]
    new_anchors: tuple[SpecialTokenPlace, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Node:
    """An answer of this server, and what came since the answer before it (`parent`: None if there is none)."""

    id: int
    parent: int | None
    key: bytes  # the chain's key behind the answer
    owner: str | None  # who asked
    session: str | None  # the client's own name for the conversation
    nonce: str  # what a note's tag carries in this conversation
    length: int  # links of the chain, the answer included
    spoken: int  # tokens of visible text and calls that the model generated on the path
    # The greatest one between what the model was shown on the path and what the requests said. Its own thoughts and
    # moved blocks are left out: these are compared anew.
    difference: Difference
    noted: tuple[int, int]  # characters and tokens of all notes on the path
    digests: tuple[bytes, ...]  # of what the messages since the parent's answer say, this answer included
    results: tuple[tuple[str, bytes], ...]  # digest of each tool result among them, by the id of its call
    shown: tuple[ShownMessage, ...]  # those messages as shown, transient ones left out; the answer is not among them
    told: tuple[tuple[Slot, str | None], ...]  # values that they, the tools and the notes told; None: told as withdrawn
    tools: tuple[Tool, ...] | None  # as rendered in the prompt's head, None if they are the parent's
    clock: datetime | None  # local time at which the template's own date stands
    grown: RenderDelta
    answer: Message  # as the client got it
    answer_tokens: tuple[int, ...]  # as generated; none if they say something else

    @property
    def size(self) -> int:
        """Roughly its memory, in bytes."""
        texts = sum(sys.getsizeof(shown.message.content) for shown in self.shown)
        texts += sum(len(value or "") for _, value in self.told) + sys.getsizeof(self.answer.content)
        tokens = 4 * len(self.grown.new_tokens) + 36 * len(self.answer_tokens)
        return sys.getsizeof(self.grown.text) + texts + tokens + 120 * len(self.grown.new_anchors) + 1500


@dataclass(frozen=True)
class Path:
    """A node with all before it."""

    node: Node
    shown: tuple[ShownMessage, ...]  # every message as the model saw it, the answer last, transient ones left out
    told: Mapping[Slot, str | None]  # what the model was told last for every slot
    tools: tuple[Tool, ...]
    rendering: Rendering  # of the node's prompt, without the answer
    generated: frozenset[int]  # places of the answers that this server generated
    chars: int  # of the contents of `shown`

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt's tokens and the answer's."""
        return self.rendering.tokens + self.node.answer_tokens

    @cached_property
    def definitions(self) -> dict[str, str]:
        """The tools' definitions by name, as shown in the prompt's head."""
        return {tool.name: definition(tool) for tool in self.tools}

    @cached_property
    def systems(self) -> tuple[str, ...]:
        """The system texts in the prompt's head."""
        lead = takewhile(lambda one: one.message.role == "system" and one.place is None, self.shown)
        return tuple(one.message.content for one in lead)


def definition(tool: Tool) -> str:
    """What the model is shown of a tool, as JSON with sorted keys: equal texts are equal JSON values."""
    return json.dumps(tool.as_function(), ensure_ascii=False, sort_keys=True)


def nonce_after(path: Path | None, session: str | None) -> str:
    """What a note's tag carries in the conversation that goes on from `path`, 32 bits: another session gets its own.

    The ids of nodes are random and nobody is told them, so a file's content cannot guess it.
    """
    if path is None:
        return secrets.token_urlsafe(4)
    if path.node.session == session:
        return path.node.nonce
    digest = hashlib.blake2b(f"{path.node.id} {session}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def extended(path: Path | None, node: Node, rendering: Rendering | None = None) -> Path:
    """The path to a child of `path`'s node. `rendering`: of its prompt, if it is at hand."""
    place = node.length - 1
    new = (*node.shown, ShownMessage(node.answer, place))
    chars = sum(len(shown.message.content) for shown in new)
    rendering = rendering or _rendering_of(path, node.grown)
    if path is None:
        return Path(node, new, dict(node.told), node.tools or (), rendering, frozenset((place,)), chars)
    tools = node.tools if node.tools is not None else path.tools
    told, generated = {**path.told, **dict(node.told)}, path.generated | {place}
    return Path(node, path.shown + new, told, tools, rendering, generated, chars + path.chars)


def rendering_delta(path: Path | None, rendering: Rendering) -> RenderDelta:
    """What `rendering` adds to that of the path which it goes on from."""
    old = path.rendering.anchors if path is not None else ()
    kept = common_prefix(old, rendering.anchors)
    common, taken = (rendering.common, rendering.taken) if path is not None else (0, 0)
    new_tokens, new_anchors = array("i", rendering.tokens[taken:]), rendering.anchors[kept:]
    return RenderDelta(common, taken, kept, rendering.text[common:], new_tokens, new_anchors, rendering.generation)


def _rendering_of(path: Path | None, new: RenderDelta) -> Rendering:
    text, tokens, anchors = new.text, tuple(new.new_tokens), new.new_anchors
    if path is not None:
        old = path.rendering
        text, tokens = old.text[: new.chars] + text, path.tokens[: new.tokens] + tokens
        anchors = old.anchors[: new.anchors] + anchors
    return Rendering(text, new.generation, tokens=tokens, anchors=anchors)


class ConversationTree:
    """Nodes by key, least recently used first out, bounded by bytes. Thread-safe."""

    def __init__(self, limit_bytes: int = 256 * 2**20) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        self._by_key: dict[bytes, tuple[int, ...]] = {}
        self._results: dict[tuple[str | None, str], bytes] = {}
        self._orders: Lru[tuple[str | None, frozenset[str]], tuple[str, ...]] = Lru(_ALIKE_KEPT * 2)
        self._paths: Lru[int, Path] = Lru(_PATHS_KEPT)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._nodes)

    def at(self, key: bytes) -> list[Path]:
        """The paths whose words are those of `key`, the newest first."""
        with self._lock:
            found = [self._path(index) for index in reversed(self._by_key.get(key, ()))]
        return [path for path in found if path is not None]

    def has(self, key: bytes) -> bool:
        return key in self._by_key

    def newest(self, owner: str | None, most: int) -> list[Node]:
        """An owner's nodes that were used last, of the last ones of all."""
        with self._lock:
            last = list(islice(reversed(self._nodes.values()), 16 * most))
        return [node for node in last if node.owner == owner][:most]

    def result_of(self, owner: str | None, call: str) -> bytes | None:
        """The digest of the result that an owner sent for a call, by `call_id`; None if there is none, or two."""
        return self._results.get((owner, call)) or None

    def arrange(self, owner: str | None, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """`tools` in the order in which the same names of the same owner were shown before: order says nothing."""
        with self._lock:
            order = self._orders.get((owner, frozenset(tool.name for tool in tools)))
        if order is None or len(order) != len(tools):
            return tuple(tools)
        by_name = {tool.name: tool for tool in tools}
        return tuple(by_name[name] for name in order)

    def add(self, node: Node, path: Path | None = None) -> Node:
        """Keeps a node and returns it. `path`: to it, if it is at hand.

        The same answer to the same prompt is kept once: then the earlier node is returned.
        """
        with self._lock:
            for index in self._by_key.get(node.key, ()):
                known = self._nodes[index]
                if _same(known, node):
                    self._touch(known)
                    return known
            if node.parent is not None and node.parent not in self._nodes:
                return node  # its beginning was evicted meanwhile
            self._insert(node)
            if path is not None:
                self._paths.put(node.id, replace(path, node=node))
            self._evict()
            return node

    def restore(self, nodes: Iterable[Node]) -> None:
        """Takes nodes back from disk, parents before children; those without their parent are left out."""
        with self._lock:
            for node in nodes:
                if node.id not in self._nodes and (node.parent is None or node.parent in self._nodes):
                    self._insert(node)
            self._evict()

    # --- under the lock ---------------------------------------------------------

    def _path(self, index: int) -> Path | None:
        """The path to a node, put together from the nearest one that is kept."""
        missing: list[Node] = []
        at: int | None = index
        path: Path | None = None
        while at is not None and (path := self._paths.get(at)) is None:
            if at not in self._nodes:
                return None
            missing.append(self._nodes[at])
            at = missing[-1].parent
        for node in reversed(missing):
            path = extended(path, node)
        if path is not None:
            self._paths.put(path.node.id, path)
            self._touch(path.node)
        return path

    def _touch(self, node: Node) -> None:
        """The node and all before it are used now; what comes before is always the more recent."""
        at: Node | None = node
        while at is not None:
            self._nodes.move_to_end(at.id)
            at = self._nodes.get(at.parent) if at.parent is not None else None

    def _insert(self, node: Node) -> None:
        self._nodes[node.id] = node
        self._touch(node)
        self._used += node.size
        alike = (*self._by_key.get(node.key, ()), node.id)
        self._by_key[node.key] = alike[-_ALIKE_KEPT:]
        for call, digest in node.results:
            # Of two results of one call, none is taken for the one that was cleared.
            key = node.owner, call
            self._results[key] = digest if self._results.get(key, digest) == digest else b""
        if node.tools:
            names = tuple(tool.name for tool in node.tools)
            if (node.owner, frozenset(names)) not in self._orders:
                self._orders.put((node.owner, frozenset(names)), names)

    def _evict(self) -> None:
        while self._used > self._limit and len(self._nodes) > 1:
            # Nothing goes on from the oldest: who goes on from a node uses it too.
            index, node = self._nodes.popitem(last=False)
            self._used -= node.size
            self._paths.pop(index)
            for call, _ in node.results:
                self._results.pop((node.owner, call), None)
            left = tuple(other for other in self._by_key.get(node.key, ()) if other != index)
            if left:  # in one step: `has` looks without the lock
                self._by_key[node.key] = left
            else:
                self._by_key.pop(node.key, None)


def _same(one: Node, other: Node) -> bool:
    def said(node: Node) -> tuple[Message, list[str]]:
        return replace(node.answer, tool_calls=()), [call_id(call.id) for call in node.answer.tool_calls]

    compared = attrgetter("parent", "grown", "answer_tokens", "owner", "session")
    return bool(compared(one) == compared(other)) and said(one) == said(other)
