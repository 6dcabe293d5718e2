"""Recorded requests of real agents, in order: what is computed is what is new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from start_llm.core.request import ChatRequest
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.prepared import Prepared
from tests.kinds import rounds, some
from tests.prompt.client import pipeline, raw_answer
from tests.prompt.models import EOS, model
from tests.prompt.traces import folder, requests

pytestmark = pytest.mark.skipif(folder() is None, reason="no recorded traces here")


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def played(client: str, family: str, pipe: Pipeline) -> Iterator[tuple[ChatRequest, Prepared, list[int]]]:
    """Each request, what was made of it, and what was generated; the answer is recorded behind it."""
    tokenizer = model(family)[1]
    for _, request, answer in requests(client):
        prepared = pipe.prepare(request, thinking=True)
        generated = tokenizer.encode(raw_answer(family, answer, prepared.rendering.in_reasoning))
        generated.append(tokenizer.special_tokens[EOS[family][0]])
        pipe.record(prepared, answer, generated)
        yield request, prepared, generated


def missing(prepared: Prepared, held: list[tuple[int, ...]]) -> int:
    """Tokens to compute, where these texts are held."""
    tokens = prepared.prompt.tokens
    return len(tokens) - max((common(tokens, other) for other in held), default=0)


@pytest.mark.parametrize(("client", "family", "most"), [
    *some([("pi", "qwen35", 6_600), ("pi", "chatml", 6_300)]),
    *some([("openclaw", "qwen35", 103_000), ("opencode", "qwen35", 31_500)]),
])  # fmt: skip
def test_computed_over_new(client, family, most):
    """The records are fixed, so is what may be computed of them. `new` is what no earlier request had sent: OpenClaw's
    other routes send the same words behind another system text, which is computed again and is not new."""
    held: list[tuple[int, ...]] = []
    computed = new = hits = 0
    for _, prepared, generated in played(client, family, pipeline(family)):
        computed += missing(prepared, held)
        new += prepared.new
        hits += prepared.view.base is not None
        held.append((*prepared.prompt.tokens, *generated[:-1]))
    assert computed <= most
    assert client == "openclaw" or computed <= 1.01 * new
    assert hits >= (0 if client == "openclaw" else len(held) // 2)


def test_guesses_spare_openclaw_its_transient_messages():
    pipe = pipeline("qwen35")
    held: list[tuple[int, ...]] = []
    sessions: set[str] = set()
    computed = 0
    answers = (answer for _, _, answer in requests("openclaw"))
    for (_, prepared, generated), answer in zip(played("openclaw", "qwen35", pipe), answers, strict=True):
        assert prepared.prompt.transient is not None
        if prepared.session in sessions:
            computed += missing(prepared, held)
        sessions.add(prepared.session)
        guess = pipe.predict(prepared, answer, generated)
        held.append((*prepared.prompt.tokens, *generated[:-1]))
        held += [guess.tokens] if guess is not None else []
    assert computed <= 37_000  # without guesses 40,074: each turn's transient message once more


def test_every_word_of_every_request_reaches_the_prompt():
    for client in ("pi", "openclaw", "opencode")[: rounds(3, 2)]:
        for request, prepared, _ in played(client, "qwen35", pipeline("qwen35")):
            text = model("qwen35")[1].decode(prepared.prompt.tokens)
            for message in request.messages:
                assert [line for line in message.content.split("\n") if line.strip() not in text] == []
