from __future__ import annotations

import pytest

from start_llm.parsing.choice import Detokenizer


class Bytes:
    """Tokens are bytes. The segment holds what mlx-lm's would: whole characters, and at the end whatever is left."""

    def __init__(self) -> None:
        self._bytes = b""
        self._text = ""

    def add_token(self, token: int) -> None:
        self._bytes += bytes([token])
        text = self._bytes.decode("utf-8", "replace")
        if not text.endswith("\ufffd"):
            self._text, self._bytes = self._text + text, b""

    def finalize(self) -> None:
        self._text += self._bytes.decode("utf-8", "replace")

    @property
    def last_segment(self) -> str:
        text, self._text = self._text, ""
        return text


def test_characters_come_whole() -> None:
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.feed(byte) for byte in "aé🙂b".encode()]
    assert [piece for piece in pieces if piece] == ["a", "é", "🙂", "b"]
    assert detokenizer.finish() == ""


def test_half_a_character_at_the_end_is_left_out() -> None:
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.feed(byte) for byte in "ab🙂".encode()[:-1]]
    assert ("".join(pieces), detokenizer.finish()) == ("ab", "")


def test_with_mlx_lms_own() -> None:
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    letters = utils._byte_decoder()
    of_byte = {byte: char for char, byte in letters.items()}

    class Tokenizer:
        def __len__(self) -> int:
            return 256

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [of_byte[token] for token in ids]

    detokenizer = Detokenizer(utils.BPEStreamingDetokenizer(Tokenizer()))
    pieces = [detokenizer.feed(byte) for byte in "aé🙂 b".encode()]
    assert "".join(pieces) + detokenizer.finish() == "aé🙂 b"
    assert all("\ufffd" not in piece for piece in pieces)
