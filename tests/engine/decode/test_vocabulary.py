"""The vocabulary that is listed here is the one that llguidance reads by itself."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from start_llm.core.errors import NotSupported
from start_llm.engine.decode import constraint, vocabulary
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.vocabulary import make_vocabulary
from tests.engine.tiny import make_tokenizer

TEXTS = ("Hello, world", ' {"a": 1}', "\n\n\tx  y", "ünï 中文 \U0001f642", "<|im_end|> a <tool_call>", "")


def bytes_fallback(*, prepend: bool = False) -> Tokenizer:
    """As Gemma's; with `prepend` as Llama 2's."""
    words = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab", "ü"]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    first = [normalizers.Prepend("▁")] if prepend else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<eos>"])
    made.add_tokens([AddedToken("[tool]", special=False), AddedToken("<mark>", special=False)])
    return made


def odd_bytes() -> Tokenizer:
    """A byte-level vocabulary with a word that stands for no bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate([*letters, "not bytes", "語"])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


@pytest.mark.parametrize(
    "backend", [make_tokenizer().backend_tokenizer, bytes_fallback(), odd_bytes()], ids=["bytes", "fallback", "odd"]
)
def test_it_is_what_llguidance_reads(backend: Tokenizer) -> None:
    ends = [backend.token_to_id(text) for text in ("<|im_end|>", "<eos>") if backend.token_to_id(text) is not None]
    assert vocabulary._words(backend) is not None
    made, read = make_vocabulary(backend, ends), LLTokenizer(backend.to_str(), eos_token=ends)
    assert (made.vocab_size, made.eos_token, made.is_canonical) == (read.vocab_size, read.eos_token, read.is_canonical)
    for token in range(made.vocab_size):
        assert made.decode_bytes([token]) == read.decode_bytes([token]), backend.id_to_token(token)
        assert made.is_special_token(token) == read.is_special_token(token), backend.id_to_token(token)
    for text in TEXTS:
        assert made.tokenize_str(text) == read.tokenize_str(text)
        assert made.tokenize_partial(text.encode()) == read.tokenize_partial(text.encode())


def test_a_kind_that_is_not_known_is_left_to_llguidance() -> None:
    backend = bytes_fallback(prepend=True)  # llguidance takes the prefix out, and the tokenizer that there is writes it
    assert vocabulary._words(backend) is None
    assert make_vocabulary(backend, [1]).tokenize_str("ab") == [backend.token_to_id("ab")]


def test_a_tokenizer_that_cuts_texts_is_not_used_as_it_is_and_not_changed() -> None:
    backend = bytes_fallback(prepend=True)
    backend.enable_truncation(2)
    assert len(make_vocabulary(backend, [1]).tokenize_str("ab a a a a")) > 2
    assert backend.truncation is not None


def test_the_vocabulary_is_made_once_and_only_if_a_grammar_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(constraint, "make_vocabulary", lambda *given: made.append(given) or make_vocabulary(*given))
    grammars = Grammars(make_tokenizer(), [1])
    assert not made
    grammars.make_vocabulary()
    grammars.make_vocabulary()
    assert len(made) == 1


def test_a_tokenizer_that_cannot_be_read_is_refused_each_time_with_the_reason() -> None:
    backend = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    tokenizer = make_tokenizer()
    tokenizer._tokenizer = backend
    grammars = Grammars(tokenizer, [1])
    for _ in range(2):
        with pytest.raises(NotSupported, match="tokenizer"):
            grammars.make_vocabulary()


def test_a_vocabulary_that_llguidance_gives_up_on_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3's, which nobody can import."""

    monkeypatch.setattr(constraint, "make_vocabulary", Mock(side_effect=PanicException("assertion failed")))
    with pytest.raises(NotSupported, match="assertion failed"):
        Grammars(make_tokenizer(), [1]).make_vocabulary()
