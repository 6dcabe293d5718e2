"""Tokens as text, by mlx-lm's own detokenizer: a token is a byte here."""

from __future__ import annotations

import pytest

from start_llm.parsing.choice import Detokenizer

utils = pytest.importorskip("mlx_lm.tokenizer_utils")
OF_BYTE = {byte: char for char, byte in utils._byte_decoder().items()}


class Tokenizer:
    def __len__(self) -> int:
        return 256

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [OF_BYTE[token] for token in ids]


@pytest.mark.parametrize(
    ("sent", "text"), [("aé🙂 b".encode(), "aé🙂 b"), ("ab🙂".encode()[:-1], "ab"), ("é".encode()[:1], "")]
)
def test_characters_come_whole_and_half_a_one_at_the_end_is_left_out(sent: bytes, text: str) -> None:
    detokenizer = Detokenizer(utils.BPEStreamingDetokenizer(Tokenizer()))
    pieces = [*map(detokenizer.feed, sent), detokenizer.finish()]
    assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)
