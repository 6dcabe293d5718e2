from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.parsing.source import LiteralScanner, Source
from tests.kinds import rounds

LITERALS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, literals: list[str]) -> list[str]:
    """Character by character: a literal that is complete cuts; of several the longest."""
    found, rest = [], ""
    for char in text:
        rest += char
        hits = [literal for literal in literals if rest.endswith(literal)]
        if hits:
            hit = max(hits, key=len)
            found += [rest[: -len(hit)], f"[{hit}]"]
            rest = ""
    return [*found, rest]


@settings(max_examples=rounds(150), deadline=None)
@given(st.text("abcd", max_size=30), LITERALS, st.data())
def test_against_a_naive_scanner(text: str, literals: list[str], data: st.DataObject) -> None:
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=5))})
    source, scanner, pieces = Source(), LiteralScanner(literals), list[str]()

    def scan():  # type: ignore[no-untyped-def]
        while True:
            before, literal = yield from scanner.step(source)
            if not before and not literal:
                return
            pieces.append(before + (f"[{literal}]" if literal else ""))

    run = scan()
    for start, end in pairwise(cuts):
        source.push(text[start:end])
        next(run, None)
    source.closed = True
    next(run, None)
    assert "".join(pieces) == "".join(naive(text, literals))


def test_literals_that_begin_alike_cost_no_more_than_the_text() -> None:
    """Stop strings that part late, and a model that writes what they share: trying each takes 100 times as long."""
    scanner = LiteralScanner("a" * (120 - number) + str(number) for number in range(64))
    source, passed = Source(), 0

    def scan():  # type: ignore[no-untyped-def]
        nonlocal passed
        while True:
            before, _ = yield from scanner.step(source)
            passed += len(before)

    run = scan()
    began = time.process_time()
    for _ in range(2_000):
        source.push("aaaa")
        next(run)
    assert passed == 2_000 * 4 - 120
    assert time.process_time() - began < 2
