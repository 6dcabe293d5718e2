"""Raw answers: the text as it was decoded, however it came in chunks; each token's logprob with its text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import ChoiceDone, Event, TextDelta, TokenLogprob
from start_llm.parsing.choice import Detokenizer, Ending, RawChoiceParser
from start_llm.parsing.registry import output_style
from start_llm.parsing.stream import OutputParser


class Pieces:
    """A token is the index of a piece; text that is not complete comes with a later one, or at the end."""

    def __init__(self, pieces: list[str], end: str = "") -> None:
        self.pieces, self.end = pieces, end

    def feed(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return self.end


def answer(pieces: list[str], stop: tuple[str, ...] = (), end: str = "") -> tuple[list[Event], Any]:
    choice = RawChoiceParser(0, OutputParser(output_style(), stop=stop, raw=True), Pieces(pieces, end), "r#0")  # type: ignore[arg-type]
    events: list[Event] = []
    for token in range(len(pieces)):
        events += choice.sampled(token, TokenLogprob(token, -float(token)))
    return [*events, *choice.finish("stop", ())], choice


def said(events: list[Event]) -> tuple[str, list[TokenLogprob]]:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(event.text for event in deltas), [item for event in deltas for item in event.logprobs]


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nwhy\n</think>\n\nHi",
        "Hi<|im_end|>\n<|im_start|>user\nMore?",
        '<tool_call>\n{"name": "get"}\n</tool_call>',
        "</think> <|channel|>analysis<|message|>x<|end|>",
        "  \n leading and trailing \n",
    ],
)
def test_nothing_is_taken_for_anything(text: str) -> None:
    events, choice = answer(list(text))
    assert said(events)[0] == text
    assert events[-1] == ChoiceDone("stop") and choice.reasoning == 0


@given(
    st.text("ab<", max_size=20),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=20),
)
def test_a_stop_string_ends_the_text_at_the_same_place_however_it_comes(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    pieces, rest = [], text
    for size in [*sizes, len(text) or 1]:
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    (chunked, logprobs), (letters, _) = said(answer(pieces, tuple(stop))[0]), said(answer(list(text), tuple(stop))[0])
    assert chunked == letters
    ends = [text.find(word) + len(word) for word in stop if word in text]
    assert letters == text if not ends else len(letters) < min(ends)
    assert not any(word in letters for word in stop)
    assert "".join(item.text or "" for item in logprobs) == chunked
    assert [item.token for item in logprobs] == list(range(len(logprobs)))


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    events, _ = answer(["a", "", "", "😀b", ""], end=" c")
    text, logprobs = said(events)
    assert text == "a😀b c"
    assert [item.text for item in logprobs] == ["a", "", "", "😀b", " c"]


def test_tokens_of_a_stop_string_are_not_told() -> None:
    events, choice = answer(["one ", "two", "EN", "D", " three"], stop=("END",))
    text, logprobs = said(events)
    assert (text, choice.ending) == ("one two", Ending.STOP_STRING)
    assert [item.text for item in logprobs] == ["one ", "two"]
    assert events[-1] == ChoiceDone("stop", 0, "END")


@pytest.mark.parametrize(
    ("sent", "text"), [("aé🙂 b".encode(), "aé🙂 b"), ("ab🙂".encode()[:-1], "ab"), ("é".encode()[:1], "")]
)
def test_characters_come_whole_and_half_a_one_at_the_end_is_left_out(sent: bytes, text: str) -> None:
    """By mlx-lm's own detokenizer: a token is a byte here."""
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    letters = {byte: char for char, byte in utils._byte_decoder().items()}

    class Tokenizer(list[int]):
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [letters[token] for token in ids]

    detokenizer = Detokenizer(utils.BPEStreamingDetokenizer(Tokenizer(range(256))))
    pieces = [*map(detokenizer.feed, sent), detokenizer.finish()]
    assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)
