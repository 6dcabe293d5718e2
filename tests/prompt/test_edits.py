"""The model's own edits, known again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.prompt.edits import Edit, after_edits, edits_in


def block(search: str, replace: str, marks: str = "{}\n```python\n{}\n```", name: str = "src/a.py") -> str:
    return marks.format(name, f"<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE")


TWO = "<<<<<<< SEARCH\na\n=======\n1\n>>>>>>> REPLACE\n<<<<<<< SEARCH\nb\n=======\n2\n>>>>>>> REPLACE"


def test_a_block_is_read():
    assert list(edits_in("Here.\n\n" + block("x\n", "y\nz\n"))) == [Edit(("src/a.py", "python"), ("x",), ("y", "z"))]


@pytest.mark.parametrize(
    ("answer", "before", "after"),
    [
        (block("b\n", "B\n"), "a\nb\nc", "a\nB\nc"),
        (block("b\nc\n", ""), "a\nb\nc", "a"),
        (block("", "new\n"), None, "new"),
        (block("", "more\n"), "a", "a\nmore"),
        (block("b\n", "B\n", marks="**`{}`**\n```\n{}\n```"), "a\nb", "a\nB"),
        (block("b\n", "B\n", marks="```python\n{}\n{}\n```"), "a\nb", "a\nB"),
        (block("b\n", "B\n") + "\n" + block("B\n", "C\n"), "b", "C"),
        (f"src/a.py\n```\n{TWO}\n```", "a\nb", "1\n2"),
        ("I rewrite it.\n\nsrc/a.py\n```\nall\nnew\n```\nDone.", "old", "all\nnew"),
        # these change nothing
        (block("no such line\n", "B\n"), "a\nb", "a\nb"),
        (block("a\n", "B\n", name="src/b.py"), "a", "a"),
        (block("lin\n", "B\n"), "line", "line"),
        ("src/a.py\n```\n<<<<<<< SEARCH\na\n=======\nb", "a", "a"),
        ("Only words.", "a", "a"),
        ("Only words.", None, None),
    ],
)  # fmt: skip
def test_what_an_answer_makes_of_a_file(answer, before, after):
    assert after_edits("src/a.py", before, [answer]) == after


def test_answers_follow_each_other():
    assert after_edits("src/a.py", "a", [block("a\n", "b\n"), "Words.", block("b\n", "c\n")]) == "c"


LINES = st.lists(st.sampled_from(["a", "b", "", "x = 1", "=======", "<<<<<<< SEARCH", ">>>>>>> REPLACE", "```"]))


@given(LINES, LINES)
def test_no_answer_is_too_odd_to_read(answer, text):
    result = after_edits("src/a.py", "\n".join(text), ["\n".join(["src/a.py", *answer])])
    assert result is not None


PLAIN = st.lists(st.sampled_from(["a", "b", "", "x = 1"]), min_size=1)


@given(PLAIN, PLAIN, PLAIN)
def test_an_edit_does_what_it_says(head, old, new):
    answer = block("only this\n" + "".join(f"{line}\n" for line in old), "".join(f"{line}\n" for line in new))
    text = "\n".join([*head, "only this", *old, "end"])
    assert after_edits("src/a.py", text, [answer]) == "\n".join([*head, *new, "end"])
