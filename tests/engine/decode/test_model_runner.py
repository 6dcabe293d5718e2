"""Rows that come and go: each says what it says alone, whichever loop decodes it."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.engine.decode.draft import DecodeCounts, RowDrafts
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.sampling import make_processors, make_sampler
from tests.engine.decode.test_verify import (
    PROMPT,
    SAMPLINGS,
    Eager,
    Prophet,
    Said,
    assert_same_kv,
    liar,
    prefilled,
    reference,
)
from tests.engine.fakes import new_row
from tests.engine.zoo import make
from tests.kinds import some

SAID = 14


def begun(model: Any, eos: list[int], rows: int) -> ModelRunner:
    return ModelRunner(model, eos=eos, max_rows=rows, gate=Eager())


def insert(runner: ModelRunner, model: Any, label: str, count: int, drafter: Any) -> tuple[int, DecodeCounts]:
    counts = DecodeCounts()
    drafts = RowDrafts(lambda: drafter, counts=counts)
    sampler, processors = make_sampler(SAMPLINGS[label]), make_processors(SAMPLINGS[label], PROMPT)
    return runner.insert(new_row(PROMPT, prefilled(model), count, sampler, processors, drafts=drafts)), counts


@pytest.mark.parametrize(
    ("name", "drafted"),
    some([("llama", True), *((name, False) for name in ("qwen3_5", "gemma3_text", "glm4_moe_lite", "lfm2"))], 5),
)
@pytest.mark.parametrize("labels", some([("greedy penalties seeded greedy",), ("greedy penalties",)]))
def test_rows_beside_each_other_verify_drafts_of_whatever_length(name: str, drafted: bool, labels: str) -> None:
    """Only where every layer can be cut. Words and KV are those of each alone, also of one that was alone before."""
    model = make(name)
    truths = {label: reference(model, SAMPLINGS[label], SAID) for label in labels.split()}
    runner = begun(model, [], 4)
    rows: dict[int, tuple[str, DecodeCounts, list[int]]] = {}

    def begin(number: int, label: str) -> None:
        prophet = Prophet([*PROMPT, *truths[label].tokens], len(PROMPT), liar(number))
        uid, counts = insert(runner, model, label, SAID, prophet)
        rows[uid] = label, counts, []

    first, *others = enumerate(labels.split())
    begin(*first)
    steps, ended = 0, 0
    while ended < 1 + len(others):
        if steps == 3:
            for other in others:
                begin(*other)
        steps += 1
        for row in runner.decode():
            label, _, said = rows[row.uid]
            said.append(row.token)
            if row.finish is not None:
                ended += 1
                assert row.cache is not None and row.tokens is not None
                assert_same_kv(Said(said, row.finish, row.cache, row.tokens), truths[label])
    assert all(said == truths[label].tokens for label, _, said in rows.values())
    if drafted:
        assert steps < SAID + 3 and sum(counts.accepted for _, counts, _ in rows.values()) > len(rows)
