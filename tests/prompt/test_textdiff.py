"""What changed in a block, as lines."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from start_llm.prompt.textdiff import MAX_LINES, changes, name_of, split_files

A, B = "a.py\n```\none\ntwo\nthree\nfour\nfive\n```", "b.py\n```python\none\ntwo\n```"
FILES = f"Some files follow.\n\n{A}\n\n{B}\n\nThat is all."


def test_a_place_in_a_file_is_named_by_the_file_and_its_line():
    assert changes(FILES, FILES.replace("three", "3\n3")) == "a.py:\n-three\n+3\n+3"
    assert changes(FILES, FILES.replace("three\n", "three\n\n")) == "a.py, line 4:\n+"


def test_each_place_is_named():
    new = FILES.replace("\none\ntwo\n```", "\none\n2\n```").replace("four", "4").replace("one\ntwo\nt", "1\ntwo\nt")
    assert changes(FILES, new) == "a.py:\n-one\n+1\n@@\n-four\n+4\nb.py:\n-two\n+2"


def test_a_line_that_stood_there_once_is_place_enough():
    old = "Tree of it.\nx\nx\nlast"
    assert changes(old, old.replace("last", "end")) == "Tree of it:\n-last\n+end"
    assert changes(old, "Tree of it.\nx\nnew\nx\nlast") == "Tree of it, line 3:\n+new"


def test_files_come_and_go_whatever_their_order():
    a, b = "a.py\n```\n1\n```\n", "b.py\n```\n2\n```\n"
    head = "Some files follow.\n\n"
    assert changes(f"{head}{a}\n{b}", f"{head}{b}\n{a}") == ""
    assert changes(head + a, f"{head}{b}\n{a}") == "New: b.py\n```\n2\n```"
    assert changes(f"{head}{a}\n{b}", head + b) == "Not there any more: a.py"


def test_a_file_that_changed_altogether_is_told_whole():
    assert changes(FILES, FILES.replace("one\ntwo\n```", "1\n2\n3\n```")) == "Now: b.py\n```python\n1\n2\n3\n```"


def test_a_file_that_the_reader_edited_is_named():
    new = FILES.replace("three", "3").replace("That", "c.py\n```\n9\n```\n\nThat")
    text = changes(FILES, new, lambda was, now: None if now.name == "b.py" else True)
    assert text == "a.py: as edited above\nc.py: as written above"
    assert changes(FILES, FILES, lambda was, now: None) == ""


def test_a_file_that_is_not_what_the_readers_edits_make_of_it_is_told_from_the_start():
    edited = lambda was, now: False if now.name == "a.py" else None  # noqa: E731
    files = FILES.replace("five", "five, which is not as short as the others")
    assert changes(files, files, edited) == "a.py: not edited, still as before"
    assert changes(files, files.replace("three", "3"), edited) == "a.py, without the edits above:\n-three\n+3"


def test_the_last_line_of_a_file_that_ends_without_a_line_break_counts():
    old = "Files\n\na.py\n```\nx\ny```\n"
    assert changes(old, old.replace("y```", "z```")) == "a.py:\n-y\n+z"
    assert split_files("a.py\n```\ny```")[1]["a.py", 0].text == "y"


def test_what_stands_right_behind_a_file_is_not_its_name():
    prose, files = split_files("a.py\n```\nx\n```\n```\ny\n```")
    assert prose == "```\ny\n```" and files["a.py", 0].text == "x"


def test_files_that_change_places_are_told_as_lines():
    one, two = "a.py\n```\n1\n```\n", "b.py\n```\n2\n```\n"
    text = changes(f"Never edit\n{one}Always edit\n{two}", f"Never edit\n{two}Always edit\n{one}")
    assert text is not None and "+b.py" in text.split("\n")


def test_of_two_files_with_one_name_none_is_said_to_be_gone():
    text = changes("Files\n\na.py\n```\n1\n```\n\na.py\n```\n2\n```", "Files\n\na.py\n```\n2\n```")
    assert text is not None and "Not there" not in text and "-1" in text.split("\n")


def test_of_lines_that_are_gone_the_first_is_told():
    old = "Map.\n\na:\n one\n two\n\nb:\n three\n four"
    assert changes(old, "Map.\n\na:\n one\n two") == "Map.:\n-b:\n(-2 more lines)"


def test_other_fences_close_with_their_own_marks():
    old = "Files\n\na.md\n````\n```\nx\n```\ny\n````\n\nb.py\n<source>\nz\n</source>"
    assert changes(old, old.replace("\ny", "\nY")) == "a.md:\n-y\n+Y"
    assert split_files(old)[1]["b.py", 0].text == "z"


def test_a_fence_that_is_not_closed_is_no_file():
    assert split_files("Files\n\na.md\n```\nx") == ("Files\n\na.md\n```\nx", {})
    assert changes("Files\n\na.md\n```\nx", "Files\n\na.md\n```\ny") == "Files:\n-x\n+y"


def test_texts_too_long_to_compare_have_no_changes():
    long = "\n".join(f"line {n}" for n in range(MAX_LINES + 10))
    assert changes("head\n" + long, "head\n" + long.replace("line", "row")) is None
    assert changes("head\n" + long, "hand\n" + long) == "hand:\n-head\n+hand"


def test_names():
    assert name_of("<tag>\nThe date is: Monday\n</tag>") == "The date is"
    assert name_of("# Rules:\nx") == "# Rules:"
    assert name_of("word " * 30) == ("word " * 12).strip()
    assert name_of("word " * 30, 10) == "word word"


def applied(old: list[str], told: list[str]) -> list[str]:
    """A file's new lines, from its old ones and the changes told: what a careful reader would do."""
    result: list[str] = []
    rest = list(old)
    index = 0
    while index < len(told):
        place = re.search(r"line (\d+):$", told[index])
        index += 1
        gone, came, more = [], [], 0
        while index < len(told) and (told[index][:1] in "+-" or told[index].startswith("(-")):
            line = told[index]
            if elided := re.fullmatch(r"\(-(\d+) more lines\)", line):
                more = int(elided[1])
            else:
                (gone if line[0] == "-" else came).append(line[1:])
            index += 1
        until = int(place[1]) - 1 - len(result) if place else rest.index(gone[0])
        result += [*rest[:until], *came]
        assert rest[until : until + len(gone)] == gone
        rest = rest[until + len(gone) + more :]
    return result + rest


LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "d", "e"]), max_size=12)


@given(LINES, LINES)
def test_a_file_can_be_told_from_its_changes(old, new):
    block = "Head of it.\n\nf.py\n```\n{}\n```"
    text = changes(block.format("\n".join(old)), block.format("\n".join(new)))
    assert text is not None
    if text.startswith("Now: "):
        assert text == "Now: f.py\n```\n{}\n```".format("\n".join(new))
    elif text:
        assert "\n".join(applied("\n".join(old).split("\n"), text.split("\n"))) == "\n".join(new)
    else:
        assert "\n".join(old) == "\n".join(new)


@given(LINES, LINES)
def test_new_words_are_never_left_out(old, new):
    text = changes("\n".join(["Head of it.", *old]), "\n".join(["Head of it.", *new]))
    assert text is not None
    for line in set(new) - set(old):
        assert f"+{line}" in text.split("\n")
