"""Drafts: what a row is likely to say next, taken from what its conversation holds already.

Pure: knows tokens and numpy, no MLX. An index belongs to one row and is used by one thread at a time.

Agents mostly repeat what they have read: the old text of an edit, a path, the frame of a call. So the longest run of
tokens that ends the row and stood somewhere before says what comes next. `SuffixIndex` finds it in constant time per
token. Whoever uses a proposal verifies it, so a wrong one costs time and never changes what is said.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np
from numpy.typing import NDArray

from start_llm.core.prompt import FIRST_IMAGE_ID

LEAST_MATCH = 3  # a proposal needs at least this many equal tokens in front of it
LONGEST_MATCH = 32  # longer matches are not told apart
FORCED_MATCH = 64  # stands for a match where a grammar leaves no choice
HEAD_MATCH = 128  # stands for a match where a head proposes; one more for each token that it has proposed before
MOST_INDEXED = 1 << 20  # tokens an index holds at first; of longer texts the end is kept. About 24 bytes each.

_MATCHES = (*range(LEAST_MATCH - 1, 7), 8, 12, 16, 24, LONGEST_MATCH, FORCED_MATCH, *range(HEAD_MATCH, HEAD_MATCH + 5))
_EXPECTED = (0.55, 0.55, 0.65, 0.75, 0.79, 0.86, 0.86, 0.92, 0.94, 0.97, 0.97, 0.8, 0.7, 0.6, 0.6, 0.5)
"""The share of right tokens by length of the match, counted in recorded coding sessions; those of heads are guessed.

The first entry is another share: how often the token behind a known pair makes a match of three.
"""
_FARTHEST: int = max(_MATCHES)
_BUCKETS = [max(0, bisect_right(_MATCHES, match) - 1) for match in range(_FARTHEST + 1)]  # by length of the match
_BELIEF = 8.0
_DECAY = 0.97

_SEPARATOR = (1 << 31) - 1  # stands between the texts and for images; no vocabulary has this token
_CANDIDATES = 256  # places looked at when a new match is searched, the newest ones
_RECENT = 16  # the same among the tokens that were appended

_WORD_BITS, _PLACE_BITS = 64, 21
_PLACE = (1 << _PLACE_BITS) - 1
_HASH = ((1 << _WORD_BITS) - 1) ^ _PLACE
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next: of a text, of a grammar or of a head."""

    tokens: list[int]
    match: int  # how many tokens in front of it were equal, or `FORCED_MATCH`, or `HEAD_MATCH`; one more for each token


@dataclass(slots=True)
class DecodeCounts:
    """Work of a decode loop."""

    forwards: int = 0  # passes
    drafted: int = 0  # proposed tokens that were computed
    accepted: int = 0  # those of them that were said: the sum of the next three
    copied: int = 0  # proposed by text that stands in the conversation
    headed: int = 0  # by a head
    forced: int = 0  # by a grammar

    def accept(self, proposal: Proposal, right: int) -> None:
        """So many tokens of the proposal were right."""
        self.accepted += right
        if proposal.match >= HEAD_MATCH:
            self.headed += right
        elif proposal.match >= FORCED_MATCH:
            self.forced += right
        else:
            self.copied += right


class Acceptance:
    """How often the next token was the proposed one, by the length of the match; what is recent weighs more."""

    def __init__(self) -> None:
        self._right, self._tried = [0.0] * len(_MATCHES), [0.0] * len(_MATCHES)
        self._belief = [_BELIEF] * len(_MATCHES)  # proposals that what is expected counts for; fades

    def chance(self, match: int) -> float:
        """That the token behind a match of this length is right."""
        bucket = _BUCKETS[min(match, _FARTHEST)]
        belief = self._belief[bucket]
        return (self._right[bucket] + belief * _EXPECTED[bucket]) / (self._tried[bucket] + belief)

    def observe(self, match: int, right: bool) -> None:
        bucket = _BUCKETS[min(match, _FARTHEST)]
        self._right[bucket] = self._right[bucket] * _DECAY + right
        self._tried[bucket] = self._tried[bucket] * _DECAY + 1.0
        self._belief[bucket] *= _DECAY


class SuffixIndex:
    """Proposes what follows a row's tokens: by the longest match among them and in views of them.

    Building takes under 100 ms for 200,000 tokens, appending a few microseconds a token. What was there at first is
    in tables of hashed runs of two and three tokens (`_Runs`); what is appended goes into a dictionary. A match that
    goes on is followed without a search.

    Args:
        prompt: token ids; the row continues them.
        others: more texts of the same conversation to take proposals from, older first.

    Attributes:
        known: how many of the row's tokens it has, the prompt's included.
    """

    def __init__(self, prompt: Sequence[int] | NDArray[np.int32], others: Sequence[Sequence[int]] = ()) -> None:
        parts: list[NDArray[np.int32]] = []
        gap = np.array([_SEPARATOR], dtype=np.int32)
        left = MOST_INDEXED
        for tokens in (prompt, *reversed(others)):
            kept = np.asarray(tokens, dtype=np.int32)[-left:] if left > 0 else np.empty(0, dtype=np.int32)
            # A model never says an image's places, and what draws tokens has no room for such ids.
            parts += [np.where(kept >= FIRST_IMAGE_ID, gap, kept), gap]
            left -= len(kept) + 1
        self.known = len(prompt)
        text = np.concatenate(parts[::-1])
        self._text = array("i", text.tobytes())  # single numbers are read and appended quicker than in numpy
        self._triples, self._pairs = _Runs(text, LEAST_MATCH), _Runs(text, LEAST_MATCH - 1)
        self._newest: dict[tuple[int, ...], list[int]] = {}
        self._new_pairs: set[tuple[int, ...]] = set()
        self._end: tuple[int, ...] = tuple(text[-LEAST_MATCH:].tolist())
        self._at = 0  # the place behind the match; the token there is proposed
        self._match = 0
        self._is_new = False  # the last two tokens stand nowhere else: the next one ends no match
        self._search()

    def append(self, tokens: Iterable[int]) -> None:
        """The row has said these."""
        for token in tokens:
            self._append(token)
            self.known += 1

    def _append(self, token: int) -> None:
        """Notes what ends here, and goes on with the match or, where that ends, looks for another one."""
        text, end = self._text, self._end
        if len(text) >= LEAST_MATCH:  # only now something stands behind these
            places = self._newest.setdefault(end, [])
            places.append(len(text))
            del places[:-_RECENT]
            self._new_pairs.add(end[1:])
        text.append(token)
        self._end = (*end[1 - LEAST_MATCH :], token)
        is_new, self._is_new = self._is_new, False
        if self._match and text[self._at] == token:
            self._at += 1
            self._match += 1
            if text[self._at] == _SEPARATOR:
                self._search()
        else:
            self._match = 0
            if not is_new:
                self._search()

    def propose(self, most: int) -> Proposal | None:
        """What may follow, one token at least and `most` at most. ``None``: nothing matches."""
        if self._match < LEAST_MATCH or most < 1:
            return None
        tokens = self._text[self._at : self._at + most].tolist()
        if _SEPARATOR in tokens:
            del tokens[tokens.index(_SEPARATOR) :]
        elif tokens and len(tokens) < most:  # the match reaches to the end: what repeats, goes on repeating
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return Proposal(tokens, min(self._match, LONGEST_MATCH)) if tokens else None

    def outlook(self) -> int:
        """The longest match that the next token could end; under `LEAST_MATCH`: it cannot bring a proposal."""
        if self._match >= LEAST_MATCH:
            return min(self._match, LONGEST_MATCH) + 1
        if not self._is_new:
            pair = self._end[1 - LEAST_MATCH :]
            self._is_new = pair not in self._new_pairs and not self._pairs.ends(pair, 1)
        return 0 if self._is_new else LEAST_MATCH

    def _search(self) -> None:
        """Finds the longest match of the end, the newest place among equals."""
        self._match = 0
        text, size, end = self._text, len(self._text), self._end
        if len(end) < LEAST_MATCH or _SEPARATOR in end:
            return
        longest = LEAST_MATCH - 1  # a hash may have lied
        for at in reversed([*self._triples.ends(end, _CANDIDATES), *self._newest.get(end, ())]):
            if text[at - 1 - longest] != text[size - 1 - longest]:
                continue
            length = 0
            # The text begins with a separator and no match reaches over one, so nothing is read in front of the text.
            while length < LONGEST_MATCH and text[at - 1 - length] == text[size - 1 - length] != _SEPARATOR:
                length += 1
            if length > longest:
                self._match, self._at, longest = length, at, length
            if length == LONGEST_MATCH:
                return


@dataclass(slots=True)
class RowDrafts:
    """What a row is given for its drafts. `find_drafter` is asked before each step until it returns one."""

    find_drafter: Callable[[], SuffixIndex | None] | None = None  # ``None``: no drafts, nor what a grammar forces
    counts: DecodeCounts = field(default_factory=DecodeCounts)  # is added to, with and without drafts


class _Runs:
    """Where each run of so many tokens of a text ends, if another token follows it."""

    def __init__(self, text: NDArray[np.int32], length: int) -> None:
        count = max(0, len(text) - length)
        hashed = np.zeros(count, dtype=np.uint64)
        for i in range(length):
            hashed += text[i : i + count].astype(np.uint64) * np.uint64(_FACTORS[i])
        hashed &= np.uint64(_HASH)
        hashed |= np.arange(length, length + count, dtype=np.uint64)
        # Hash and end in one number: one array is sorted ten times quicker than the order of it is found.
        runs = hashed[text[length : length + count] != _SEPARATOR]
        runs.sort()
        self._shift = _WORD_BITS - max(1, count.bit_length() - 2)  # a few runs have the same first bits
        first_bits = (runs >> np.uint64(self._shift)).astype(np.int64)
        starts = np.cumsum(np.bincount(first_bits + 1, minlength=(1 << (_WORD_BITS - self._shift)) + 1))
        # Single numbers are read quicker than from an array.
        self._runs, self._starts = memoryview(runs), memoryview(starts.astype(np.int32))

    def ends(self, run: Sequence[int], most: int) -> list[int]:
        """The newest ends of a run, ascending; a hash may lie, so some of them may be ends of another one."""
        key = sum(map(mul, run, _FACTORS)) & _HASH  # its low bits are left free for a place
        bucket = key >> self._shift
        first, last = self._starts[bucket], self._starts[bucket + 1]
        first = bisect_left(self._runs, key, first, last)
        last = bisect_left(self._runs, key + _PLACE, first, last)
        return [found & _PLACE for found in self._runs[max(first, last - most) : last]]
