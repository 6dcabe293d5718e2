"""Prompts that cannot fit are refused before they are read, rendered or encoded as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from start_llm.core.errors import ContextLengthExceeded
from start_llm.prompt.tokenise import PIECE, LengthCheck


class Pairs:
    """A token is two characters."""

    longest_token = 16
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.special_tokens: dict[str, int] = {}
        self.encoded = 0
        self.most_at_once = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        self.most_at_once = max(self.most_at_once, len(text))
        return [0] * ((len(text) + 1) // 2)

    def decode(self, tokens: Sequence[int]) -> str:
        return "--" * len(tokens)


CONTEXT = 100_000


def refused(texts: Sequence[str], before: int = 0) -> tuple[int, Pairs]:
    tokenizer = Pairs()
    with pytest.raises(ContextLengthExceeded) as error:
        LengthCheck(tokenizer, CONTEXT).check(texts, before)
    assert "needs at least" in error.value.message and error.value.code == "context_length_exceeded"
    return error.value.prompt, tokenizer


def test_what_no_tokenizer_can_fit_is_not_encoded_at_all() -> None:
    tokens, tokenizer = refused(["x" * 2_000_000, "x" * 1_300_000])
    assert (tokens, tokenizer.encoded) == (3_300_000 // 16, 0)


def test_the_rest_is_counted_in_pieces_until_it_is_too_much() -> None:
    tokens, tokenizer = refused(["x" * 3_000_000])
    assert 2 * CONTEXT < tokens <= 2 * CONTEXT + PIECE // 2
    assert tokenizer.most_at_once == PIECE and tokenizer.encoded <= 4 * CONTEXT + PIECE


def test_tokens_in_front_count() -> None:
    assert refused(["x" * 900_000], before=2 * CONTEXT)[0] > 2 * CONTEXT


@pytest.mark.parametrize("context", [0, CONTEXT])
def test_what_can_fit_and_what_has_no_limit_costs_nothing(context: int) -> None:
    tokenizer = Pairs()
    LengthCheck(tokenizer, context).check(["x" * 799_000])
    assert tokenizer.encoded == 0
