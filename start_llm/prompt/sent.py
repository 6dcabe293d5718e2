"""What each owner has sent and been answered before, as hashes: tells how many tokens of a prompt are new.

Two things are kept of a request: its text, as a chain of pieces, so that a prompt that begins alike is known up to
where it differs; and each message and line of the system text by itself, so that a history which has to be computed
again, behind a line that has changed, does not pass for new. Knows nothing of what is stored or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter

from start_llm.core.messages import Message, Tool
from start_llm.files.lru import Lru
from start_llm.prompt.reading import MessageChain
from start_llm.prompt.tree import Node, Rendering, ShownMessage, definition
from start_llm.prompt.view import View

_KEPT, _KEPT_BEGUN = 1 << 18, 1 << 10
_BY_LINES = 1 << 16  # characters of a text whose lines are pieces; behind them its messages are
_RAW_PIECE = 32  # tokens of a prompt that is no conversation


class SentTexts:
    """Bounded: what was used least recently goes first. Nothing of one owner is found for another one. Thread-safe."""

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        self._count_tokens = count_tokens
        self._hashes: Lru[int, None] = Lru(_KEPT)
        # behind a piece, by its hash: characters of the next one that a request came to, and their hash
        self._begun: Lru[int, tuple[int, int]] = Lru(_KEPT_BEGUN)

    def add(self, owner: str | None, chain: MessageChain, view: View, rendering: Rendering) -> set[int]:
        """A request that was sent. Returns what was new of it, see `take_back`."""
        digests = [entry.facts.digest for entry in chain.entries if entry.place is not None]
        systems = [entry.message.content for entry in chain.entries if entry.message.role == "system"]
        return self._add(owner, (*digests, *map(definition, view.tools)), systems, rendering)

    def take_back(self, owner: str | None, rendering: Rendering, fresh: set[int], end: int) -> None:
        """Nothing behind `end` (a character, or a token as in `_pieces`) was computed: of `fresh` it is new again."""
        kept = {piece: at for piece, at in _pieces(owner, rendering) if at <= end}
        for hashed in fresh - kept.keys():
            self._hashes.pop(hashed)
        last, at = next(reversed(kept.items()), (_beginning(owner), 0))
        if at < end <= len(rendering.text):
            self._begun.put(last, (end - at, hash(rendering.text[at:end])))

    def add_answer(self, node: Node) -> None:
        """An answer that was generated, and what it answers; also one that was recorded by a server before this one."""
        systems = [value for slot, value in node.told if slot.rule == "system" and value is not None]
        text = node.grown.text if node.parent is None else ""  # only a first turn has all before its pieces
        rendering = Rendering(text, node.grown.generation, anchors=node.grown.new_anchors)
        self._add(node.owner, (*node.digests, *map(definition, node.tools or ())), systems, rendering)

    def _add(
        self, owner: str | None, items: Iterable[bytes | str], systems: Iterable[str], text: Rendering
    ) -> set[int]:
        lines = (line for system in systems for line in system.split("\n"))
        hashes = {hash((owner, item)): None for item in (*items, *lines)}
        hashes |= dict.fromkeys(piece for piece, _ in _pieces(owner, text))
        fresh = {hashed for hashed in hashes if hashed not in self._hashes}
        for hashed in hashes:
            self._hashes.put(hashed, None)
        return fresh

    def knows(self, owner: str | None, item: bytes | str) -> bool:
        """Whether this owner sent a message of that digest, or a system text with that line, or was so answered."""
        return hash((owner, item)) in self._hashes

    def new_tokens(self, owner: str | None, chain: MessageChain, view: View, rendering: Rendering) -> int:
        """Tokens of a prompt that its owner had neither sent nor been answered before."""
        tokens = len(rendering.tokens)
        chars, known = self._known_front(owner, rendering)
        rest = tokens - max(known, rendering.taken)
        answers = [index for index, shown in enumerate(view.new) if shown.message.role == "assistant"]
        if not answers:
            return rest
        behind = len(view.new) - answers[-1] - 1
        starts = sum(anchor.start and chars <= anchor.char < rendering.generation for anchor in rendering.anchors)
        if known >= rendering.taken and starts <= behind:
            return rest
        tools = view.tools if view.base is None else ()
        share = self._unknown_share(owner, chain, view.new, answers[-1], tools)
        if view.base is None:  # of the whole text: all of it stands behind what is known
            share *= len(rendering.text) / max(1, len(rendering.text) - chars)
        return min(rest, round(rest * share))

    def _known_front(self, owner: str | None, rendering: Rendering) -> tuple[int, int]:
        """Characters and tokens at the front of the text that were sent before, piece by piece."""
        known = takewhile(lambda piece: piece[0] in self._hashes, _pieces(owner, rendering))
        last, end = max(known, key=itemgetter(1), default=(_beginning(owner), 0))
        if not rendering.text:
            return 0, end
        length, hashed = self._begun.get(last) or (0, 0)
        if length and hash(rendering.text[end : end + length]) == hashed:
            end += length
        if end == len(rendering.text):
            return end, len(rendering.tokens)
        begun, token, _ = rendering.anchor_at(end)
        return end, token + self._count_tokens(rendering.text[begun:end])

    def _unknown_share(
        self, owner: str | None, chain: MessageChain, shown: Sequence[ShownMessage], last: int, tools: Iterable[Tool]
    ) -> float:
        """How much of messages and tools is new, by characters; nothing behind the last answer was sent before."""
        unknown = total = 0
        for index, one in enumerate(shown):
            size = _size(one.message)
            total += size
            if index > last:
                unknown += size
            elif one.place is None:
                lines = one.message.content.split("\n")
                unknown += size - sum(len(line) + 1 for line in lines if self.knows(owner, line))
            elif not self.knows(owner, chain.entries[chain.indices[one.place]].facts.digest):
                unknown += size
        for text in map(definition, tools):
            total += len(text)
            unknown += 0 if self.knows(owner, text) else len(text)
        return unknown / max(1, total)


def _pieces(owner: str | None, rendering: Rendering) -> Iterator[tuple[int, int]]:
    """Hashes of the text's pieces, each with all before it, and the character (or token) at which the piece ends."""
    text, hashed, at = rendering.text, _beginning(owner), 0
    if not text:
        for at in range(0, len(rendering.tokens), _RAW_PIECE):
            piece = rendering.tokens[at : at + _RAW_PIECE]
            hashed = hash((hashed, piece))
            yield hashed, at + len(piece)
        return
    while at < min(len(text), _BY_LINES):
        end = text.find("\n", at) + 1 or len(text)
        hashed = hash((hashed, text[at:end]))
        yield hashed, end
        at = end
    for end in (*(anchor.char for anchor in rendering.anchors if anchor.start), len(text)):
        if end > at:
            hashed = hash((hashed, text[at:end]))
            yield hashed, end
            at = end


def _beginning(owner: str | None) -> int:
    return hash((owner, "pieces"))


def _size(message: Message) -> int:
    """Roughly the characters that a template makes of a message."""
    return message.chars + 40 * (1 + len(message.tool_calls))
