"""Cutting texts at special tokens is exact, and given up where it is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from start_llm.core.errors import ContextLengthExceeded
from start_llm.core.messages import Message
from start_llm.prompt.guard import CUT
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.probe import probe
from start_llm.prompt.tokenise import PIECE, Coder, LengthCheck
from tests.kinds import rounds
from tests.prompt.client import pipeline, request, say
from tests.prompt.models import CHATML, TEMPLATES, model

PIECES = st.sampled_from(["a", "b", " ", "\n", "é", "def ", "<|im_", "<|im_start|>", "<|im_end|>", "."])
TEXT = st.lists(PIECES, max_size=8).map("".join)


def coder(family: str = "chatml") -> Coder:
    template, tokenizer = model(family)
    return Coder(tokenizer, probe(template, tokenizer))


CODER = coder()


@settings(max_examples=rounds(200), deadline=None, derandomize=True)
@given(TEXT, TEXT)
def test_the_tokens_of_both_parts_are_those_of_the_whole(a, b):
    whole, anchors = CODER.encode(a + "<|im_start|>" + b)
    assert whole == CODER.encode(a)[0] + CODER.encode("<|im_start|>" + b)[0]
    decode = model("chatml")[1].decode
    for char, token, _ in anchors:
        assert decode(whole[:token]) == (a + "<|im_start|>" + b)[:char]


@settings(max_examples=rounds(60), deadline=None, derandomize=True)
@given(
    st.lists(TEXT, min_size=1, max_size=4), st.lists(TEXT, min_size=1, max_size=4), st.sampled_from(sorted(TEMPLATES))
)
def test_any_two_conversations_give_the_tokens_of_their_text(first, second, family):
    """Whatever was served before, tokens are those of the text, as encoded whole (nothing generated is reused here)."""
    pipe = pipeline(family)
    tokenizer = model(family)[1]
    for texts in (first, second):
        messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
        prepared = pipe.prepare(request(messages), thinking=True)
        text = prepared.rendering.text
        assert prepared.prompt.tokens == tuple(tokenizer.encode(text))
        assert tokenizer.decode(prepared.prompt.tokens) == text.replace(CUT, "")
        pipe.record(prepared, say("never sent back", None), tokenizer.encode("never sent back"))


def greedy_tokenizer() -> HFTokenizer:
    """A tokenizer whose special tokens swallow the white space before them, as some do."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False, lstrip=True) for name in names])
    from transformers import PreTrainedTokenizerFast

    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML), [])


def test_special_tokens_that_swallow_white_space_are_not_cut_at():
    tokenizer = greedy_tokenizer()
    template = HFTemplate(tokenizer._tokenizer)
    made = Coder(tokenizer, probe(template, tokenizer))
    assert made.cuts == frozenset()
    text = template.render([{"role": "user", "content": "x  "}], None, True)
    assert made.encode(text) == (tokenizer.encode(text), [])


def test_the_cuts_of_every_family_are_found():
    for family in TEMPLATES:
        made = coder(family)
        assert made.cuts and made.starts and made.starts <= made.cuts


def test_half_a_surrogate_pair_is_encoded_as_one_character():
    tokenizer = model("chatml")[1]
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    pipe = pipeline("chatml")
    prepared = pipe.prepare(request([Message("user", "x \ud83d y"), Message("user", "z")]), thinking=True)
    assert "x \ufffd y" in tokenizer.decode(prepared.prompt.tokens)


# --- prompts that cannot fit are refused before they are read, rendered or encoded as a whole ---


class Pairs:
    """A token is two characters."""

    longest_token = 16
    encoded = most_at_once = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        self.most_at_once = max(self.most_at_once, len(text))
        return [0] * ((len(text) + 1) // 2)


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
