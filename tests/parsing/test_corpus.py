from __future__ import annotations

import pytest

from tests.parsing.corpus import CASES, Case
from tests.parsing.helpers import TOOLS, calls, run, style_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_malformed(case: Case) -> None:
    for size in (10**6, 1, 3, 7):
        tools = TOOLS if case.tools else ()
        parsed = run(case.text, size, form=style_of(case.form), tools=tools, in_reasoning=case.inside)[1]
        assert calls(parsed) == list(case.calls), size
        assert (parsed.content, parsed.reasoning) == (case.content, case.reasoning), size
