from __future__ import annotations

import pytest

from start_llm.dashboard.tables import print_table


def test_figures_stand_at_the_right_and_nothing_reaches_the_terminal_but_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("NAME", "BYTES"), [("small", "7"), ("a\x1b[31m[bold]", "1,000")], words=("NAME",))
    heading, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert heading.startswith("NAME") and second.startswith("a?[31m[bold]")
    assert len(heading) == len(first) == len(second)
