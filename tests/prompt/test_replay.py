"""Recorded requests of real agents, in order: what is computed is what is new."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(("client", "family", "most"), [
    *some([("pi", "qwen35", 6_600), ("pi", "chatml", 6_300)]),
    *some([("openclaw", "qwen35", 103_000), ("opencode", "qwen35", 31_500)]),
])  # fmt: skip
def test_computed_over_new(client, family, most):
    """The records are fixed, so is what may be computed of them. `new` is what no earlier request had sent: OpenClaw's
    other routes send the same words behind another system text, which is computed again and is not new."""
    pipe = pipeline(family)
    tokenizer = model(family)[1]
    held: list[tuple[int, ...]] = []
    computed = new = hits = 0
    for _, request, answer in requests(client):
        prepared = pipe.prepare(request, thinking=True)
        tokens = prepared.prompt.tokens
        computed += len(tokens) - max((common(tokens, other) for other in held), default=0)
        new += prepared.new
        generated = tokenizer.encode(raw_answer(family, answer, prepared.rendering.in_reasoning))
        generated.append(tokenizer.special_tokens[EOS[family][0]])
        pipe.record(prepared, answer, generated)
        hits += prepared.view.base is not None
        held.append((*tokens, *generated[:-1]))
    assert computed <= most
    assert client == "openclaw" or computed <= 1.01 * new
    assert hits >= (0 if client == "openclaw" else len(held) // 2)


def test_guesses_spare_openclaw_its_transient_messages():
    pipe = pipeline("qwen35")
    tokenizer = model("qwen35")[1]
    held: list[tuple[int, ...]] = []
    sessions: set[str] = set()
    computed = 0
    for _, request, answer in requests("openclaw"):
        prepared = pipe.prepare(request, thinking=True)
        tokens = prepared.prompt.tokens
        assert prepared.prompt.transient is not None
        if prepared.session in sessions:
            computed += len(tokens) - max(common(tokens, other) for other in held)
        sessions.add(prepared.session)
        generated = tokenizer.encode(raw_answer("qwen35", answer, prepared.rendering.in_reasoning))
        generated.append(tokenizer.special_tokens["<|im_end|>"])
        pipe.record(prepared, answer, generated)
        guess = pipe.predict(prepared, answer, generated)
        held.append((*tokens, *generated[:-1]))
        held += [guess.tokens] if guess is not None else []
    assert computed <= 37_000  # without guesses 40,074: each turn's transient message once more


def test_every_word_of_every_request_reaches_the_prompt():
    for client in ("pi", "openclaw", "opencode")[: rounds(3, 2)]:
        pipe = pipeline("qwen35")
        tokenizer = model("qwen35")[1]
        for _, request, answer in requests(client):
            prepared = pipe.prepare(request, thinking=True)
            text = tokenizer.decode(prepared.prompt.tokens)
            for message in request.messages:
                assert [line for line in message.content.split("\n") if line.strip() not in text] == []
            pipe.record(
                prepared, answer, tokenizer.encode(raw_answer("qwen35", answer, prepared.rendering.in_reasoning))
            )
