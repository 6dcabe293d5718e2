"""A loop is found soon behind the point where it is certain; sound text is never taken for one."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from start_llm.parsing.repetition import ANYTHING_REPEATS, WORDS_REPEAT, RepetitionGuard
from tests.kinds import some
from tests.prompt.models import fast_tokenizer

VOCABULARY = 50_000
LATE = 64 + 128  # tokens between two looks, and a period


def words(tokens: Sequence[int]) -> str:
    """Each token is a word of its own."""
    return " ".join("".join(chr(97 + token // 26**place % 26) for place in range(4)) for token in tokens)


def digits(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens))


@pytest.mark.parametrize("before", some([777, 0, 5, 20_000]))
@pytest.mark.parametrize("period", [1, 2, 7, 40, 128])
def test_a_loop_is_found_once_it_is_certain(period: int, before: int) -> None:
    drawn = random.Random(period + before)
    for decode, limit in ((words, WORDS_REPEAT if period > 1 else ANYTHING_REPEATS), (digits, ANYTHING_REPEATS)):
        guard = RepetitionGuard(decode)
        assert not any(guard.add(drawn.randrange(VOCABULARY)) for _ in range(before))
        loop = drawn.sample(range(VOCABULARY), period)
        found = [guard.add(loop[number % period]) for number in range(limit + LATE)]
        at = next(number for number, one in enumerate(found, 1) if one)
        assert found[at - 1] == period and limit < at <= limit + LATE and guard.run(period) >= limit


def test_a_loop_of_more_than_the_longest_period_is_none() -> None:
    guard = RepetitionGuard(words)
    loop = random.Random(1).sample(range(VOCABULARY), 129)
    assert not any(guard.add(loop[number % 129]) for number in range(10_000))


def test_one_word_that_differs_begins_it_anew() -> None:
    guard = RepetitionGuard(words)
    loop = list(range(1, 8))
    tokens = ([*loop * 100, 9_999] * 20)[:14_000]
    assert not any(map(guard.add, tokens))


def test_what_repeats_is_counted_from_the_last_difference() -> None:
    guard = RepetitionGuard(words)
    for number in range(512):
        guard.add(-1 if number in {460, 490} else number % 5)
    assert guard.run(5) == 512 - 490 - 5 - 1


SOUND = {
    "zeros": "0, " * 900,
    "base64 of zeros": "A" * 3_000,
    "a ruler": "=" * 900,
    "blanks": " " * 2_000,
    "hex": "00000000 " * 250,
    "nulls": '{"values": [' + "null, " * 500 + "]}",
    "flags": "[" + "true, false, " * 60 + "]",
    "lines": "    assert value == expected, message\n" * 30,
    "table": "| a | b | c |\n" * 80,
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_repetition_is_left_alone(name: str) -> None:
    tokenizer = fast_tokenizer()
    guard = RepetitionGuard(tokenizer.decode)
    assert not any(map(guard.add, tokenizer.encode(SOUND[name], add_special_tokens=False)))


@pytest.mark.slow
def test_no_file_of_this_machine_is_taken_for_a_loop(smol_path: Path) -> None:
    """Some of its sources, tables and licences, and of its binaries in base64, with a vocabulary as models have it."""
    found = sorted(path for top in ("/usr/share", "/usr/lib/python3") for path in Path(top).rglob("*"))
    tokenizer, seen = AutoTokenizer.from_pretrained(smol_path), 0
    for path in random.Random(5).sample(found, min(len(found), 2_400)):
        try:
            data = path.read_bytes() if path.is_file() and 100 < path.stat().st_size < 300_000 else b""
            text = data.decode() if b"\0" not in data[:1000] else base64.encodebytes(data[:100_000]).decode()
        except (OSError, UnicodeDecodeError):
            continue
        guard = RepetitionGuard(tokenizer.decode)
        assert not any(map(guard.add, tokenizer.encode(text, add_special_tokens=False))), path
        seen += bool(text)
    assert seen > 100
