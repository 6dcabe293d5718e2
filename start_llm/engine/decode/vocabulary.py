"""A tokenizer's vocabulary as llguidance holds it, made in pieces between which other threads run.

llguidance can read a tokenizer by itself, from its JSON. For 250,000 tokens that takes 3 s on a slow core, and holds
Python's lock from begin to end, so that no model decodes meanwhile. Most of it goes into a second tokenizer, and the
one that there is does the same. So the tokens' bytes are listed here; of them llguidance makes its tree, and the slices
that make masks quick, in two calls, which hold the lock for 0.7 s each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

_BYTES = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
_OTHERS = [byte for byte in range(0x100) if byte not in _BYTES]
_LETTERS = {ord(letter): byte for byte, letter in _BYTES.items()}
_LETTERS |= {0x100 + index: byte for index, byte in enumerate(_OTHERS)}
_NO_BYTE = "\u0100"
_FROM_LETTERS = dict.fromkeys(range(256), _NO_BYTE) | {k: chr(byte) for k, byte in _LETTERS.items()}
"""To characters below 256, one for each byte; a character that stands for none is over that."""


def make_vocabulary(backend: Any, eos: Sequence[int]) -> LLTokenizer:
    """Any thread. Raises ValueError: llguidance cannot read a tokenizer of this kind.

    `backend`: a `tokenizers.Tokenizer`. `eos`: every token that ends a generation.
    """
    words = _words(backend) if eos else None
    if words is None:
        return _read_again(backend, eos)
    made = LLTokenizer(TokenizerWrapper(_Known(backend, words, eos[0])), eos_token=list(eos), slices=[])
    return made.with_slices(LLTokenizer.general_slices())


class _Known:
    """What llguidance asks of a tokenizer. `tokens`: bytes of each; read while the vocabulary is made."""

    def __init__(self, backend: Any, tokens: list[bytes], eos: int) -> None:
        self._backend = backend
        self.tokens = tokens
        added = backend.get_added_tokens_decoder().items()
        # The tokens that never match as text: as llguidance would tell by itself.
        self.special_token_ids = sorted(
            index
            for index, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        )
        self.eos_token_id, self.bos_token_id = eos, None

    def __call__(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def _words(backend: Any) -> list[bytes] | None:
    """The bytes of each token, empty where there is none of that number; ``None``: not of a kind that is known here."""
    letters = _reading(_state(backend.decoder))
    added = backend.get_added_tokens_decoder()
    size = backend.get_vocab_size(with_added_tokens=True)
    prepends = '"Prepend"' in json.dumps(_state(backend.normalizer))  # llguidance takes that out
    if letters is None or prepends or max(added, default=0) >= size:
        return None
    words = []
    for index in range(size):
        text = added[index].content if index in added else backend.id_to_token(index)
        words.append(b"" if text is None else text.encode() if index in added else letters(text))
    return words


def _reading(decoder: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    """From the text of a token in the vocabulary to its bytes."""
    if decoder.get("type") == "ByteLevel":
        return _byte_level
    parts = decoder.get("decoders", ())
    if not any(part["type"] == "ByteFallback" for part in parts):
        return None
    spaces = [
        part["pattern"].get("String", "") for part in parts if part["type"] == "Replace" and part["content"] == " "
    ]
    space = next((each for each in reversed(spaces) if len(each) == 1), " ")
    return lambda text: _byte_fallback(text, space)


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_FROM_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return b""


def _byte_fallback(text: str, space: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(space, " ").encode()


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its JSON says it."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {}


def _read_again(backend: Any, eos: Sequence[int]) -> LLTokenizer:
    if backend.padding is not None or backend.truncation is not None:  # a copy takes as long as reading does
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
    return LLTokenizer(backend.to_str(), eos_token=list(eos))
