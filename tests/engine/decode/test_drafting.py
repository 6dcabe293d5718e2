"""Which tokens an index is made of, and when a row gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from scripts.bench.drafting import Published
from start_llm.core.messages import Message
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.decode.draft import RowDrafts, SuffixIndex
from start_llm.engine.decode.drafting import Drafts, make_drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.ranks.interface import Ranks
from start_llm.prompt.drafts import Views
from tests.engine.fakes import submit
from tests.waiting import until

ASKED, SAID = list(range(100, 130)), list(range(500, 530))


@pytest.fixture
def drafts() -> Any:
    made = Drafts(DraftGate(Published({1: 1.0})))
    yield made
    made.close()


def request(**more: Any) -> Submit:
    return submit("id", ASKED, **more)[0]


def ready(row: RowDrafts) -> SuffixIndex:
    assert row.find_drafter is not None
    return until(row.find_drafter)


def proposed(drafts: Drafts, work: Submit, start: Sequence[int]) -> list[int]:
    drafter = ready(drafts.begin(work, []))
    drafter.append(start)
    found = drafter.propose(4)
    return found.tokens if found is not None else []


def test_nothing_of_another_request_is_proposed_not_even_of_one_with_the_same_prompt(drafts: Drafts) -> None:
    ready(drafts.begin(request(), SAID))
    assert proposed(drafts, request(), SAID[:3]) == []


def test_what_a_row_had_said_before_it_was_interrupted_belongs_to_it(drafts: Drafts) -> None:
    drafter = ready(drafts.begin(request(), SAID[:5]))
    assert drafter.known == len(ASKED) + 5
    drafter.append(SAID[:3])
    found = drafter.propose(2)
    assert found is not None and found.tokens == SAID[3:5]


def test_views_are_proposed_from_and_encoded_once() -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [ord(c) for c in text]

    views = Views(encode, escaped=True, most_tokens=2000)
    messages = (Message("user", 'not "this"'), Message("tool", 'a "quoted"\nline'), Message("tool", "plain"))
    assert [bytes(view.tolist()).decode() for view in views(messages)] == ['a \\"quoted\\"\\nline']
    views(messages)
    assert len(calls) == 1
    views(tuple(Message("tool", f"{i}\n" * 100) for i in range(40)))
    assert len(views._kept) < 10


def test_views_that_fail_cost_the_drafts_and_nothing_else(drafts: Drafts, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise ValueError("no tokenizer")

    row = drafts.begin(request(views=broken), [])
    assert row.find_drafter is not None
    drafts._builder.shutdown(wait=True)
    assert row.find_drafter() is None and row.find_drafter() is None
    assert caplog.text.count("no tokenizer") >= 1


def test_a_request_that_wants_none_has_none(drafts: Drafts) -> None:
    assert drafts.begin(replace(request(), sampling=Sampling(drafts=False)), []).find_drafter is None


def test_a_model_whose_cache_cannot_be_made_decodes_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("no cache")

    assert make_drafts("model", broken, Ranks()) is None
    assert "no drafts" in caplog.text
