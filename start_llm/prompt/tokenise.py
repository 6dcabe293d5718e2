"""Text to tokens, once only: what was tokenised or generated before is taken over as it is.

A text may be cut at a special token if the tokens of both parts are those of the whole. That is checked at load for
every special token that the template writes; with none that passes, texts are encoded whole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Protocol

from start_llm.core.errors import ContextLengthExceeded
from start_llm.core.messages import MARK, Picture
from start_llm.core.prompt import FIRST_IMAGE_ID, ImageSpan, image_ids
from start_llm.prompt.guard import CUT
from start_llm.prompt.hf import HFTokenizer
from start_llm.prompt.probe import special_pattern
from start_llm.prompt.textdiff import common_prefix
from start_llm.prompt.traits import Traits
from start_llm.prompt.tree import Path, Rendering, SpecialTokenPlace

_CHAR = itemgetter(0)
_PROBES = (("word", "word"), ("x \n", "\n y"), ("  ", "1"), ("ü", " ünï"), ("a.", ""), ("", "\n\nA"))

PIECE = 1 << 16
"""Characters that are encoded at a time to find out whether a text is too long."""
_COUNTED = 2  # contexts
_PLAIN = 8  # characters a token: a text under this is encoded at once, it takes a few seconds at most


class LengthCheck:
    """Refuses a prompt that cannot fit the context before it costs what it would cost to encode it.

    A tokenizer does one to three million characters a second, so 40 MB hold a thread for most of a minute. What is
    within twice the context is counted to its end, for the error to have the exact number. `context` 0: no limit.
    """

    def __init__(self, tokenizer: HFTokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._most = _COUNTED * context

    def check(self, texts: Sequence[str], before: int = 0) -> None:
        """Raises ContextLengthExceeded if the tokens of `texts`, behind so many others, are far too many.

        Where a text is cut changes its tokens by a few: no matter beside a whole context.
        """
        chars = sum(map(len, texts))
        if not self._context or chars <= _PLAIN * self._context:
            return
        least = before + chars // self._tokenizer.longest_token  # whatever they say
        pieces = (text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE))
        counts = accumulate((len(self._tokenizer.encode(piece)) for piece in pieces), initial=before)
        if count := next((count for count in chain((least,), counts) if count > self._most), 0):
            raise ContextLengthExceeded(prompt=count, asked=1, limit=self._context, at_least=True)


class Eyes(Protocol):
    """How a model with eyes reads an image's mark. Thread-safe."""

    def places(self, width: int, height: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Tokens before an image of this size, how many places it has, and tokens behind it."""

    def problem(self, width: int, height: int) -> str:
        """Why an image of this size cannot be shown, ``""`` if it can."""

    def key(self, identity: str) -> str:
        """Names the image as this model's processor sees it."""

    def prepare(self, picture: Any) -> dict[str, Any]:
        """What the processor makes of a picture (RGB, Pillow's): arrays by name."""


class ImageMarks:
    """Marks of images to tokens, and where the images stand in a prompt; for models with eyes. Thread-safe."""

    def __init__(self, eyes: Eyes) -> None:
        self._eyes = eyes

    def tokens_of(self, mark: re.Match[str]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What the processor writes before an image, the ids of the image's places, and what it writes behind it."""
        before, length, behind = self._eyes.places(int(mark[2]), int(mark[3]))
        return before, image_ids(self._eyes.key(mark[1]), length), behind

    def spans(self, text: str, tokens: Sequence[int], pictures: Mapping[str, Picture]) -> tuple[ImageSpan, ...] | None:
        """The images of a prompt; None if its tokens are not those of its text (another processor made them).

        Images that `tokens` end before are left out.
        """
        spans: list[ImageSpan] = []
        at = 0
        for match in MARK.finditer(text):
            while at < len(tokens) and tokens[at] < FIRST_IMAGE_ID:
                at += 1
            if at == len(tokens):
                return tuple(spans)
            _, ids, _ = self.tokens_of(match)
            if tuple(tokens[at : at + len(ids)]) != ids:
                return None
            load = partial(lambda picture: self._eyes.prepare(picture.load()), pictures[match[1]])
            spans.append(ImageSpan(at, len(ids), self._eyes.key(match[1]), load))
            at += len(ids)
        return tuple(spans) if all(token < FIRST_IMAGE_ID for token in tokens[at:]) else None


class Coder:
    """Encodes prompts. Stateless after construction, so thread-safe."""

    def __init__(
        self,
        tokenizer: HFTokenizer,
        traits: Traits,
        image_marks: ImageMarks | None = None,
        length: LengthCheck | None = None,
    ) -> None:
        """`image_marks`: of a model with eyes; `length`: refuses what is far too long before it is encoded."""
        self._tokenizer, self._image_marks = tokenizer, image_marks
        self._length = length or LengthCheck(tokenizer, 0)
        special = tokenizer.special_tokens
        self.cuts = frozenset(name for name in special if name in traits.structure and self._cuts_at(name))
        self.starts = traits.starts & self.cuts
        self._start_ids = frozenset(special[name] for name in self.starts)
        self._pattern = special_pattern(self.cuts)
        self._ids = frozenset(special[name] for name in self.cuts)

    def _cuts_at(self, name: str) -> bool:
        encode = self._tokenizer.encode
        is_one = encode(name) == [self._tokenizer.special_tokens[name]]
        return is_one and all(encode(a + name + b) == encode(a) + encode(name + b) for a, b in _PROBES)

    def encode(self, text: str, *, char: int = 0, token: int = 0) -> tuple[list[int], list[SpecialTokenPlace]]:
        """Tokens of `text`, and its anchors; offsets count from `char` and `token`. Raises ContextLengthExceeded.

        What a processor writes around an image (for gemma3 line breaks) is encoded together with the text beside it.
        """
        self._length.check((text,), token)
        marks = list(MARK.finditer(text)) if self._image_marks is not None else []
        if not marks or self._image_marks is None:
            return self._encode(text, char, token)
        tokens: list[int] = []
        anchors: list[SpecialTokenPlace] = []
        behind: tuple[int, ...] = ()
        images = [(mark.span(), self._image_marks.tokens_of(mark)) for mark in marks]
        at = 0
        for (start, end), (before, ids, after) in [*images, ((len(text), len(text)), ((), (), ()))]:
            piece, places = self._between(behind, text[at:start], before)
            anchors += [SpecialTokenPlace(char + at + c, token + len(tokens) + t, starts) for c, t, starts in places]
            tokens += [*piece, *ids]
            behind, at = after, end
        return tokens, anchors

    def _between(
        self, behind: tuple[int, ...], text: str, before: tuple[int, ...]
    ) -> tuple[list[int], list[SpecialTokenPlace]]:
        """Tokens of a text with what processors write around it, for the images beside it; and its own anchors."""
        around = [self._tokenizer.decode(tokens) for tokens in (behind, before)]
        if [tuple(self._tokenizer.encode(written)) for written in around] != [behind, before]:
            tokens, anchors = self._encode(text, 0, len(behind))  # not to be written as text
            return [*behind, *tokens, *before], anchors
        tokens, anchors = self._encode(around[0] + text + around[1], -len(around[0]), 0)
        return tokens, [anchor for anchor in anchors if 0 <= anchor.char < len(text)]

    def _encode(self, text: str, char: int, token: int) -> tuple[list[int], list[SpecialTokenPlace]]:
        """`encode` for text without images."""
        tokens = self._tokenizer.encode(text)
        if self._pattern is None:
            return tokens, []
        places = [match.start() for match in self._pattern.finditer(text)]
        ids, starts = self._ids, self._start_ids
        indices = [index for index, value in enumerate(tokens) if value in ids]
        pairs = list(zip(places, indices, strict=False))
        if len(places) != len(indices):
            # The tokenizer reads some special token differently here; only the text's own start is sure.
            pairs = [pair for pair in pairs[:1] if pair == (0, 0)]
        return tokens, [SpecialTokenPlace(char + at, token + i, tokens[i] in starts) for at, i in pairs]

    def code(self, rendering: Rendering, path: Path | None, *, answered: bool = True) -> Rendering:
        """The rendering with its tokens, taking over from `path` what is sure to be the same.

        `answered`: where the text goes on from the path's answer, its tokens are taken as they were generated.
        """
        text = rendering.text
        if path is None:
            return self._code_behind(rendering, Rendering("", 0), 0)
        old = path.rendering
        common = common_prefix(text, old.text)
        answered = answered and common >= old.generation and bool(path.node.answer_tokens)
        if answered and (coded := self._continue(rendering, path, common)) is not None:
            return coded
        return self._code_behind(rendering, old, common)

    def code_again(self, rendering: Rendering, old: Rendering) -> Rendering:
        """The rendering with the tokens of its whole text; those of `old` are taken where its text is the same."""
        return self._code_behind(rendering, old, common_prefix(rendering.text, old.text))

    def _code_behind(self, rendering: Rendering, old: Rendering, common: int) -> Rendering:
        """With the tokens of `old`, whose first `common` characters are the same, as far as these may be cut off."""
        text = rendering.text
        index = bisect_right(old.anchors, common, key=_CHAR)
        while index and not (self._pattern and self._pattern.match(text, old.anchors[index - 1].char)):
            index -= 1  # the common prefix may end right before the anchor's special token
        char, token, _ = old.anchors[index - 1] if index else (0, 0, False)
        tokens, places = self.encode(text[char:], char=char, token=token)
        whole, anchors = old.tokens[:token] + tuple(tokens), (*old.anchors[: max(0, index - 1)], *places)
        return replace(rendering, tokens=whole, anchors=anchors, common=common, taken=token)

    def _continue(self, rendering: Rendering, path: Path, common: int) -> Rendering | None:
        """The path's prompt, what was generated, and the rest; None if the text does not show it."""
        text, old, answer = rendering.text, path.rendering, path.node.answer
        end = self._turn_end(text, path)
        if end is None:
            return None
        parts = ((answer.reasoning or "").strip(), answer.content.strip(), *(call.name for call in answer.tool_calls))
        said = text[old.generation : end].replace(CUT, "")
        if not all(part in said for part in parts):
            return None
        generated = self.without_end(path.node.answer_tokens)
        taken = len(old.tokens) + len(generated)
        tokens, anchors = self.encode(text[end:], char=end, token=taken)
        kept = old.anchors[: bisect_right(old.anchors, old.generation, key=_CHAR)]
        whole = old.tokens + (generated + tuple(tokens))  # the long tuple is copied once
        return replace(rendering, tokens=whole, anchors=(*kept, *anchors), common=common, taken=taken)

    def _turn_end(self, text: str, path: Path) -> int | None:
        """Where the rendered turn ends: at the first special token that neither prompt nor model wrote in it."""
        if self._pattern is None:
            return None
        old = path.rendering
        char, token, _ = old.anchor_at(old.generation)
        header = [one for one in old.tokens[token:] if one in self._ids] if char == old.generation else []
        inside = frozenset(self.without_end(path.node.answer_tokens))
        for match in self._pattern.finditer(text, old.generation):
            token = self._tokenizer.special_tokens[match.group()]
            if header and header[0] == token:
                header.pop(0)
            elif token not in inside:
                return match.start()
        return None

    def without_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """What was generated, without the token that ended it."""
        return tokens[:-1] if tokens and tokens[-1] in self._tokenizer.eos_ids else tokens

    def says(self, tokens: tuple[int, ...], content: str, calls: bool) -> bool:
        """The tokens say what the client was told, and nothing behind it (a stop string cuts what was generated)."""
        text = self._tokenizer.decode(self.without_end(tokens))
        return content.strip() in text and (calls or text.rstrip().endswith(content.rstrip()))
