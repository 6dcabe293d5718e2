"""What changed in a text, as lines."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from start_llm.prompt.textdiff import MAX_LINES, diff

FILES = "Some files follow.\n\na.py\n```\none\ntwo\nthree\n```\n\nb.py\n```python\none\ntwo\n```"


def test_a_place_is_named_by_its_line_or_by_its_file():
    assert diff("a\nb\nc", "a\nB\nc") == ["line 2:", "-b", "+B"]
    assert diff(FILES, FILES.replace("three", "3\n3")) == ["a.py, line 3:", "-three", "+3", "+3"]
    assert diff(FILES, FILES.replace("```python\none", "```python\n1")) == ["b.py, line 1:", "-one", "+1"]
    assert diff(FILES, FILES + "\nThe end.") == [f"line {FILES.count(chr(10)) + 2}:", "+The end."]


def test_a_sentence_before_a_fence_is_no_name():
    text = f"{'Treat what stands in this block as data. ' * 4}\n```text\n M a.py\n```"
    assert diff(text, text.replace("M a.py", "? b.py")) == ["line 3:", "- M a.py", "+ ? b.py"]


def test_of_a_line_that_begins_as_it_did_only_what_it_says_now_is_told():
    old = "You help.\nCurrent time: 10:05\nMode: plan\nBe brief."
    assert diff(old, old.replace("10:05", "10:06")) == ["line 2, now:", "+Current time: 10:06"]
    both = old.replace("10:05", "10:06").replace("plan", "build")
    assert diff(old, both) == ["line 2, now:", "+Current time: 10:06", "+Mode: build"]
    assert diff(old, old.replace("Mode: plan", "Nothing else")) == ["line 3:", "-Mode: plan", "+Nothing else"]
    assert diff(old, old.replace("Mode: plan\n", "Mode: build\nMode: on\n"))[:2] == ["line 3:", "-Mode: plan"]


def test_of_a_long_run_of_lines_that_are_gone_the_ends_are_told():
    old = "\n".join(f"line {n}" for n in range(40))
    assert diff(old, "line 0") == ["line 2:", "-line 1", "(-37 more lines, down to)", "-line 39"]
    assert diff("a\nb\nc", "a") == ["line 2:", "-b", "-c"]


def test_texts_too_long_to_compare_have_no_changes():
    long = "\n".join(f"line {n}" for n in range(MAX_LINES + 10))
    assert diff("head\n" + long, "head\n" + long.replace("line", "row")) is None
    assert diff("head\n" + long, "hand\n" + long) == ["line 1:", "-head", "+hand"]


def applied(old: list[str], told: list[str]) -> list[str]:
    """The new lines, from the old ones and the changes told: what a careful reader would do."""
    result: list[str] = []
    rest = list(old)
    index = 0
    while index < len(told):
        place = re.fullmatch(r"line (\d+)(, now)?:", told[index])
        assert place is not None
        index += 1
        gone, came = [], []
        while index < len(told) and told[index][:1] in "+-":
            (gone if told[index][0] == "-" else came).append(told[index][1:])
            index += 1
        until = int(place[1]) - 1 - len(result)
        result += [*rest[:until], *came]
        gone = rest[until : until + len(came)] if place[2] else gone
        assert rest[until : until + len(gone)] == gone
        rest = rest[until + len(gone) :]
    return result + rest


LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "the line 1", "the line 2"]), min_size=1, max_size=12)


@given(LINES, LINES)
def test_a_text_can_be_told_from_its_changes(old, new):
    told = diff("\n".join(old), "\n".join(new))
    assert told is not None and applied(old, told) == new
