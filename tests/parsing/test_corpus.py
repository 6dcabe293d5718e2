from __future__ import annotations

import pytest

from start_llm.parsing.registry import output_style
from tests.parsing.corpus import CASES, Case
from tests.parsing.helpers import TOOLS, calls, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_malformed(case: Case) -> None:
    for size in (10**6, 1, 7):
        form = output_style(tool_parser=case.form, reasoning_parser="think_tag")
        parsed = run(case.text, size, form=form, tools=TOOLS if case.tools else (), in_reasoning=case.inside)[1]
        assert calls(parsed) == list(case.calls), size
        assert (parsed.content, parsed.reasoning) == (case.content, case.reasoning), size


def test_the_corpus_is_large() -> None:
    assert len(CASES) >= 60
    assert len({case.text for case in CASES}) >= 60
