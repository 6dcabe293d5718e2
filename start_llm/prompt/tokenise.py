"""Text to tokens, once only: what was tokenised or generated before is taken over as it is.

A special token is a place where a text may be cut: the tokens of both parts are the tokens of the whole. That is
checked at load for every special token that the template writes; with none that passes, texts are encoded whole.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from start_llm.prompt.ports import Tokenizer
from start_llm.prompt.probe import Traits, special_pattern
from start_llm.prompt.render import common_prefix
from start_llm.prompt.turns import Anchor, Generation, Open, Record

_CHAR = itemgetter(0)
_PROBES = (("word", "word"), ("x \n", "\n y"), ("  ", "1"), ("ü", " ünï"), ("a.", ""), ("", "\n\nA"))


@dataclass(frozen=True, slots=True)
class Coded:
    """Tokens of a text.

    Attributes:
        anchors: places where a special token stands, ascending.
        common: characters of the text that agree with the record's text.
        shared: tokens of the record's prompt that were taken over.
        taken: tokens that were taken over, generated ones included.
        generated: the generation that was taken over in place of its rendering, if one was.
        resumed: character offset from which the text was encoded.
    """

    tokens: tuple[int, ...]
    anchors: tuple[Anchor, ...]
    common: int = 0
    shared: int = 0
    taken: int = 0
    generated: Generation | None = None
    resumed: int = 0

    def token_at(self, char: int) -> int:
        """Token offset of the last anchor at or before `char`; 0 if there is none."""
        index = bisect_right(self.anchors, char, key=_CHAR)
        return self.anchors[index - 1][1] if index else 0

    def anchor_before(self, token: int) -> Anchor:
        index = bisect_right(self.anchors, token, key=itemgetter(1))
        return self.anchors[index - 1] if index else (0, 0, False)


class Coder:
    """Encodes prompts. Stateless after construction, so thread-safe."""

    def __init__(self, tokenizer: Tokenizer, traits: Traits) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        self._eos = tokenizer.eos_ids
        self.cuts = frozenset(name for name in special if name in traits.structure and self._cuts_at(name))
        self.starts = traits.starts & self.cuts
        self._start_ids = frozenset(special[name] for name in self.starts)
        self._pattern = special_pattern(self.cuts)
        self._ids = frozenset(special[name] for name in self.cuts)
        self._special = special

    def _cuts_at(self, name: str) -> bool:
        encode = self._tokenizer.encode
        if encode(name) != [self._tokenizer.special_tokens[name]]:
            return False
        return all(encode(a + name + b) == encode(a) + encode(name + b) for a, b in _PROBES)

    def encode(self, text: str, *, char: int = 0, token: int = 0) -> tuple[list[int], list[Anchor]]:
        """Tokens of `text`, and its anchors; offsets count from `char` and `token`."""
        tokens = self._tokenizer.encode(text)
        if self._pattern is None:
            return tokens, []
        places = [match.start() for match in self._pattern.finditer(text)]
        ids = self._ids
        indices = [index for index, value in enumerate(tokens) if value in ids]
        if len(places) != len(indices):
            # The tokenizer reads some special token differently here; only the text's own start is sure.
            places, indices = places[:1], indices[:1]
            if not places or not indices or places[0] != 0 or indices[0] != 0:
                return tokens, []
        starts = self._start_ids
        return tokens, [
            (char + place, token + index, tokens[index] in starts) for place, index in zip(places, indices, strict=True)
        ]

    def code(self, text: str, base: Record | None, opened: Open | None, generation: Generation | None) -> Coded:
        """Tokens of `text`, taking over from `base` what is sure to be the same.

        `opened` and `generation` name the turn of `base` that the conversation goes on from, if it does.
        """
        if base is None:
            tokens, anchors = self.encode(text)
            return Coded(tuple(tokens), tuple(anchors))
        common = common_prefix(text, base.text)
        if opened is not None and generation is not None and common >= opened.char:
            coded = self._continue(text, base, opened, generation, common)
            if coded is not None:
                return coded
        index = bisect_right(base.anchors, common, key=_CHAR)
        while index and not self._stands(text, base.anchors[index - 1]):
            index -= 1
        if not index:
            tokens, anchors = self.encode(text)
            return Coded(tuple(tokens), tuple(anchors), common)
        char, token, _ = base.anchors[index - 1]
        tokens, anchors = self.encode(text[char:], char=char, token=token)
        kept = base.anchors[: index - 1]
        return Coded(base.tokens[:token] + tuple(tokens), (*kept, *anchors), common, token, token, None, char)

    def _stands(self, text: str, anchor: Anchor) -> bool:
        """The special token of an anchor stands in `text` too (the common prefix may end right before it)."""
        return self._pattern is not None and self._pattern.match(text, anchor[0]) is not None

    def _continue(self, text: str, base: Record, opened: Open, generation: Generation, common: int) -> Coded | None:
        """The record's prompt up to `opened`, what was generated, and the rest; None if the text does not show it."""
        end = self._turn_end(text, base, opened, generation)
        if end is None or not generation.shown_in(text[opened.char : end]):
            return None
        generated = generation.tokens
        if generated and generated[-1] in self._eos:
            generated = generated[:-1]
        head = base.tokens[: opened.end] + generated
        tokens, anchors = self.encode(text[end:], char=end, token=len(head))
        kept = base.anchors[: bisect_right(base.anchors, opened.char, key=_CHAR)]
        return Coded(head + tuple(tokens), (*kept, *anchors), common, opened.end, len(head), generation, end)

    def _turn_end(self, text: str, base: Record, opened: Open, generation: Generation) -> int | None:
        """Where the rendered turn ends: at the first special token that neither prompt nor model wrote in it."""
        if self._pattern is None:
            return None
        index = bisect_right(base.anchors, opened.char, key=_CHAR)
        begins = base.anchors[index - 1][1] if index and base.anchors[index - 1][0] == opened.char else opened.end
        header = [token for token in base.tokens[begins : opened.end] if token in self._ids]
        stopped = bool(generation.tokens) and generation.tokens[-1] in self._eos
        inside = frozenset(generation.tokens[:-1] if stopped else generation.tokens)
        for match in self._pattern.finditer(text, opened.char):
            token = self._special[match.group()]
            if header and header[0] == token:
                header.pop(0)
            elif token not in inside:
                return match.start()
        return None

    def generation_text(self, generation: Generation) -> str:
        """What was generated, as text, without the token that ended it."""
        tokens = generation.tokens
        return self._tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in self._eos else tokens)


def boundaries(anchors: tuple[Anchor, ...], length: int) -> tuple[int, ...]:
    """Token offsets of message starts, ascending, neither 0 nor the end."""
    places = [token for _, token, start in anchors if start and 0 < token < length]
    assert all(a < b for a, b in pairwise(places))
    return tuple(places)
