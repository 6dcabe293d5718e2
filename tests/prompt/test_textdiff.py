"""What changed in a block, as lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from start_llm.prompt.textdiff import MAX_LINES, changes, name_of

FILES = "Some files follow.\n\na.py\n```\none\ntwo\nthree\nfour\nfive\n```\n\nb.py\n```python\none\ntwo\n```"


def test_a_place_in_a_file_is_named_by_the_file_and_its_line():
    text = changes(FILES, FILES.replace("three", "3"), 1)
    assert text == "a.py, line 3:\n two\n-three\n+3\n four"


def test_each_place_is_named():
    new = FILES.replace("\none\ntwo\n```", "\none\n2\n```").replace("four", "4")
    text = changes(FILES, new, 0)
    assert text == "a.py:\n-four\n+4\nb.py, line 2:\n-two\n+2"


def test_without_neighbours_a_line_that_stood_there_once_is_place_enough():
    old = "Tree of it.\nx\nx\nlast"
    assert changes(old, old.replace("last", "end"), 0) == "Tree of it:\n-last\n+end"
    assert changes(old, "Tree of it.\nx\nnew\nx\nlast", 0) == "Tree of it, line 3:\n+new"


def test_other_fences_close_with_their_own_marks():
    old = "Files\n\na.md\n````\n```\nx\n```\ny\n````\n\nb.py\n<source>\nz\n</source>"
    assert changes(old, old.replace("\ny", "\nY"), 0) == "a.md:\n-y\n+Y"
    assert changes(old, old.replace("z", "Z"), 0) == "b.py:\n-z\n+Z"


def test_texts_too_long_to_compare_have_no_changes():
    long = "\n".join(f"line {n}" for n in range(MAX_LINES + 10))
    assert changes("head\n" + long, "head\n" + long.replace("line", "row"), 1) is None
    assert changes("head\n" + long, "hand\n" + long, 1) == "hand, line 1:\n-head\n+hand\n line 0"


def test_names():
    assert name_of("<tag>\nThe date is: Monday\n</tag>") == "The date is"
    assert name_of("# Rules:\nx") == "# Rules:"
    assert name_of("word " * 30) == ("word " * 12).strip()
    assert name_of("word " * 30, 10) == "word word"


LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "```", "f.py"]), max_size=12)


@given(LINES, LINES, st.integers(0, 2))
def test_nothing_is_left_out(old, new, neighbours):
    text = changes("\n".join(["Head of it.", *old]), "\n".join(["Head of it.", *new]), neighbours)
    assert text is not None
    told = text.split("\n")
    for line in set(new) - set(old):
        assert f"+{line}" in told
    for line in set(old) - set(new):
        assert f"-{line}" in told
    gone = sum(line.startswith("-") for line in told)
    came = sum(line.startswith("+") for line in told)
    assert came - gone == len(new) - len(old)
