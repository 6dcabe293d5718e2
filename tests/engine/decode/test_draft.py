"""Proposals against a search that looks at every place."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.core.prompt import image_ids
from start_llm.engine.decode.draft import LEAST_MATCH, LONGEST_MATCH, SuffixIndex
from tests.kinds import rounds

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def longest_match(texts: list[list[int]]) -> tuple[int, set[int]]:
    """Of the end of the last text: its length, and the tokens that stand behind places with such a match."""
    row = texts[-1]
    best, follow = 0, set[int]()
    for text in texts:
        for place in range(1, len(text) if text is not row else len(row)):
            length = 0
            while length < min(place, len(row)) and text[place - 1 - length] == row[-1 - length]:
                length += 1
            if place < len(text) and length >= LEAST_MATCH and min(length, LONGEST_MATCH) >= best:
                follow = {text[place]} | (follow if min(length, LONGEST_MATCH) == best else set())
                best = min(length, LONGEST_MATCH)
    return best, follow


@given(st.lists(TOKENS, max_size=3), TOKENS, TOKENS)
@settings(max_examples=rounds(150), deadline=None)
def test_the_longest_match_is_proposed_however_the_row_came_about(
    others: list[list[int]], prompt: list[int], said: list[int]
) -> None:
    index = SuffixIndex(prompt, others)
    for i in range(len(said) + 1):
        row = prompt + said[:i]
        length, follow = longest_match([*others, row])
        proposal = index.propose(5)
        if length == 0:
            assert proposal is None
        else:
            assert proposal is not None and proposal.match == length and proposal.tokens[0] in follow
        if i < len(said):
            outlook = index.outlook()
            assert index.known == len(row)
            index.append([said[i]])
            after = index.propose(1)
            assert after is None or after.match <= outlook


@pytest.mark.parametrize(
    ("row", "others", "tokens"),
    [
        ([9, 1, 2, 3], [[1, 2, 3, 4, 5], [7, 8, 9]], [4, 5]),
        ([5, 1, 2, 3], [[9, 1, 2], [3, 4]], None),
        ([4, 1, 2, 3, 1, 2, 3], [], [1, 2, 3, 1, 2, 3, 1]),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [], [8, 1, 2, 3, 8, 1, 2]),
    ],
    ids=["it ends with its text", "no match across two texts", "what repeats goes on", "the newest of equal matches"],
)
def test_what_is_proposed(row: list[int], others: list[list[int]], tokens: list[int] | None) -> None:
    proposal = SuffixIndex(row, others).propose(7)
    assert (proposal and proposal.tokens) == tokens


def test_an_index_of_200_000_tokens_is_built_at_once_and_a_token_costs_the_same_as_in_a_short_one() -> None:
    random = np.random.default_rng(1)
    lines = [random.integers(0, 49_000, random.integers(4, 30)) for _ in range(3000)]
    text = np.concatenate([lines[i] for i in random.zipf(1.3, 30_000) % len(lines)])[:200_000].astype(np.int32)
    said = np.concatenate([lines[i] for i in random.zipf(1.3, 100) % len(lines)])[:1000].tolist()

    def best(run: Callable[[], object], of: int = 5) -> float:
        times = []
        for _ in range(of):
            start = time.thread_time()
            run()
            times.append(time.thread_time() - start)
        return min(times)

    def said_on(size: int) -> float:
        index = SuffixIndex(text[:size])
        return best(lambda: index.append(said), of=3) / len(said)

    assert best(lambda: SuffixIndex(text)) < 0.5  # 60 ms on a quiet machine
    assert said_on(len(text)) < 1e-3  # about 20 us on a quiet machine
    assert said_on(len(text)) < 20 * said_on(2000)


def test_an_endless_prompt_keeps_its_end_and_a_bounded_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("start_llm.engine.decode.draft.MOST_INDEXED", 50)
    index = SuffixIndex([1, 2, 3, 4, *range(100, 140), 1, 2, 3], [list(range(200, 300))])
    assert len(index._text) <= 52
    proposal = index.propose(1)
    assert proposal is not None and proposal.tokens == [4]
    assert SuffixIndex([1, 2, 3, 4, *range(100, 160), 1, 2, 3]).propose(1) is None


def test_no_place_of_an_image_is_proposed_and_no_match_reaches_across_one() -> None:
    image = image_ids("picture", 40)
    index = SuffixIndex([7, 8, 9, 5, *image, 11, 12, 13, 14])
    index.append([7, 8, 9])
    found = index.propose(8)
    assert found is not None and found.tokens == [5]
    index.append([5])
    assert index.propose(8) is None
    index.append([11, 12, 13])
    found = index.propose(1)
    assert found is not None and (found.tokens, found.match) == ([14], 3)


def test_of_more_places_than_are_looked_at_the_newest_count() -> None:
    older = [token for number in range(1000, 1400) for token in (number, 1, 2, 3, 4)]
    proposal = SuffixIndex([*older, 7, 1, 2, 3, 99, 8, 7, 1, 2, 3]).propose(1)
    assert proposal is not None and proposal.tokens == [99]
