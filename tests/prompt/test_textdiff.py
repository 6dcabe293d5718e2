"""What changed in a text, as lines."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.prompt.textdiff import MAX_LINES, changed, diff, withdraws

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
    assert diff(old, "line 0") == ["line 2, no longer valid:", "-line 1", "(-37 more lines, down to)", "-line 39"]
    assert diff("a\nb\nc", "a") == ["line 2, no longer valid:", "-b", "-c"]


def test_a_line_that_stands_elsewhere_is_not_told_as_invalid():
    assert diff("Never push.\nBe kind.\nNever push.", "Never push.\nBe kind.") == [
        *("line 3, now only elsewhere:", "-Never push.")
    ]
    swapped = diff("Head.\nFirst: a.\nThen: b.\nLast.", "Head.\nThen: b.\nFirst: a.\nLast.")
    assert swapped == ["line 2:", "+Then: b.", "line 4, now only elsewhere:", "-Then: b."]
    block = "\n".join(f"Rule {n} of this house." for n in range(20))
    moved = diff(f"Head.\n{block}\n\nMiddle.\nOf it.", f"Head.\n\nMiddle.\nOf it.\n{block}")
    assert moved is not None and not any("no longer valid" in line for line in moved)
    both = diff("Never push.\nBe kind.\nNever push.\nNever merge.", "Never push.\nBe kind.")
    assert both == [*("line 3, now only elsewhere:", "-Never push.", "line 3, no longer valid:", "-Never merge.")]


@pytest.mark.parametrize(
    ("old", "new", "is_withdrawn"),
    [
        ("Be kind.\nThe wiki is at wiki.acme.test.", "Be kind.", True),
        ("Be kind.\n2. Ask Milena before a migration.\nBye.", "Be kind.\nBye.", True),
        ("Be kind.\nAsk Milena before a migration.\nBye.", "Be kind.\n\nBye.", True),  # as templates leave a line
        ("Be kind.\nAsk Milena before a migration.\nBye.", "Be kind.\n---\nBye.", True),
        ("Be very kind.\nAsk Milena before a migration.\nBye.", "Be rude.\nBye.", True),  # one came in the place of two
        ("It is 10:05.\nAsk Milena before a migration.\nBye.", "It is 10:06.\nBye.", True),
        ("It is 10:05.\n- Region: eu-1\nBye.", "It is 10:06.\nBye.", True),
        ("Be kind.\n<rule>Never push to main.</rule>", "Be kind.", True),
        ("Be kind.\n永远不要删除任何文件。", "Be kind.", True),
        ("Be kind.\nファイルを削除しないでください（必ず）。", "Be kind.", True),
        ("Be kind.\n終了。", "Be kind.", False),
        ("Be kind.\nThe wiki is at a.test.", "Be kind.\nThe wiki is at b.test.", False),  # another one
        ("Be kind.\nThe wiki is at a.test.\nBye.", "The wiki is at a.test.\nBe kind.\nBye.", False),  # elsewhere
        ("Be kind.\n- Region: eu-1", "Be kind.", True),  # a value with its name
        ("Be kind.\nexport CONFIG=/run/atlas.toml", "Be kind.", True),
        ("Be kind.\nexport A=b", "Be kind.", True),
        ("Be kind.\n4b825dc fix: a parser", "Be kind.", False),  # a commit that is not among the last ones any more
        ("a.py\n```\nkey = 7\nx\n```\n", "a.py\n```\nx\n```\n", False),  # code
        ("Be kind.\n| worker | 7452 |", "Be kind.", True),
        ("Be kind.\nPort: 80\nName: a\nPort: 90", "Be kind.\nPort: 80\nName: a", True),
        ("Be kind.\n- Region: eu-1", "Be kind.\n- Region: eu-2", False),  # another one
        ("Be kind.\n- Region: eu-1\nBye.", "- Region: eu-1\nBe kind.\nBye.", False),  # elsewhere
        ("Be kind.\n" + "\n".join(f"- Key{n}: {n}" for n in range(13)), "Be kind.", False),  # a mode
        ("Be kind.\nOn branch main\n M x.py\n1a2b3c Add a parser", "Be kind.", False),  # no sentences
        ("Be kind.\n\n# Git\nOn branch main", "Be kind.", True),  # a section
        ("Be kind.\n<git>\nOn branch main\n</git>", "Be kind.", True),
        ("Be kind.\n<git>\nOn branch main\n M x.py\n</git>", "Be kind.\n<git>\nOn branch main\n</git>", False),
        ("Be kind.\n- : x and y", "Be kind.", False),  # no name
        ("Be kind.\n" + "\n".join(f"Rule {n} is to be kept." for n in range(13)), "Be kind.", False),  # a mode
        ("Be kind.\n" + "a. " * 20_000 + "x", "Be kind.", False),  # looked at once, or it would take for ever
    ],
)
def test_a_sentence_or_a_named_value_that_is_gone_cannot_be_told(old: str, new: str, is_withdrawn: bool):
    assert withdraws(old, new) is is_withdrawn


def test_another_text_that_is_told_whole_stands_for_all_lines_it_replaces():
    old, new = "You are a coder.\nAlways run the tests.\nBye.", "You write summaries of talks.\nBye."
    assert withdraws(old, new)
    assert not withdraws(old, new, is_whole=True)
    assert withdraws(old, "You are a coder.\nBye.", is_whole=True)


def test_a_line_that_others_replace_here_and_that_stands_elsewhere_is_not_told_as_replaced():
    told = diff("Never push.\nBe kind.\nNever push.", "Never push.\nBe kind.\nAsk first.")
    assert told == ["line 3, now only elsewhere:", "-Never push.", "line 3:", "+Ask first."]
    told = diff("Never push.\nBe kind.\nNever push.\nBe brief.", "Never push.\nBe kind.\nAsk first.")
    assert told == ["line 3, now only elsewhere:", "-Never push.", "line 3:", "-Be brief.", "+Ask first."]


def test_where_a_note_tells_that_a_named_line_is_gone_its_value_is_left_out():
    """Many lines of a system text at once, and lines of a message."""
    told = diff("\n".join(["Be kind.", *(f"- Key{n}: {n}" for n in range(14))]), "Be kind.")
    ends = [f"-- Key{n}: {UNGIVEN}" for n in (0, 13)]
    assert told == ["line 2, no longer valid:", ends[0], "(-12 more lines, down to)", ends[1]]
    told = diff("Be kind.\nPort: 80\n M a.py", "Be kind.")
    assert told == ["line 2, no longer valid:", f"-Port: {UNGIVEN}", "- M a.py"]
    ports = "Port: 80\nName: a\nPort: 90"
    assert diff(ports, "Port: 80\nName: a") == ["line 3, no longer valid:", "-Port: 90"]  # not the other one
    code = FILES.replace("three", "key = 7")
    assert diff(code, code.replace("key = 7\n", "")) == ["a.py, line 3, no longer valid:", "-key = 7"]


def test_whether_a_line_says_something_is_found_in_bounded_time():
    begun = time.process_time()
    for part in ("a", "a.", "A ", "x: ", " ", "- ", "a b ", "(", "1."):
        withdraws(f"Be kind.\n{part * 100_000}", "Be kind.")
    assert time.process_time() - begun < 20


def test_texts_too_long_to_compare_have_no_changes():
    long = "\n".join(f"line {n}" for n in range(MAX_LINES + 10))
    assert diff("head\n" + long, "head\n" + long.replace("line", "row")) is None
    assert diff("head\n" + long, "hand\n" + long) == ["line 1:", "-head", "+hand"]


def applied(old: list[str], new: list[str], told: list[str]) -> list[str]:
    """The new lines, from the old ones and the changes told: what a careful reader would do."""
    result: list[str] = []
    rest = list(old)
    index = 0
    while index < len(told):
        place = re.fullmatch(r"line (\d+)(, now|, no longer valid|, now only elsewhere)?:", told[index])
        assert place is not None
        index += 1
        gone, came = [], []
        while index < len(told) and told[index][:1] in "+-":
            (gone if told[index][0] == "-" else came).append(told[index][1:])
            index += 1
        until = int(place[1]) - 1 - len(result)
        result += [*rest[:until], *came]
        gone = rest[until : until + len(came)] if place[2] == ", now" else gone
        for was, line in zip(rest[until:], gone, strict=False):
            name = line.removesuffix(f" {UNGIVEN}")
            assert line == was or (
                name != line and was.startswith(name) and not any(map(re.compile(re.escape(name)).match, new))
            )
        assert len(rest) >= until + len(gone)
        rest = rest[until + len(gone) :]
    return result + rest


UNGIVEN = "(not given any more)"
RULE = (
    "Before anything is deleted, moved, renamed, copied or shown to people who do not belong to this house, ask {} "
    "first, and say in the end what was done, who had asked for it, when that was, and why it was done."
)


def test_what_is_as_before_in_a_long_line_is_left_out():
    assert diff(RULE.format("Ann"), RULE.format("Bob")) == [
        "line 1, now:",
        "+Before anything is deleted, (as before) belong to this house, ask Bob first, and say in the end (as before)",
    ]
    assert changed(RULE.format("Ann"), "Ask Bob.") == "Ask Bob."
    # Within a line: a word came, the end was cut.
    words = "delete, edit, emoji-list, poll, react, read, send, topic-create, topic-edit. If missing: read + thread"
    assert changed(f"Actions: {words} id.", f"Actions: broadcast, {words} ...", within=True) == (
        "Actions: broadcast, delete, edit, emoji-list, (as before) If missing: read + thread ..."
    )


def test_a_line_that_has_the_mark_in_it_is_told_whole():
    new = RULE.format("Bob") + " (as before)"
    assert changed(RULE.format("Ann"), new) == new


def test_a_long_line_that_is_gone_is_named_by_its_beginning():
    assert diff(f"One.\n{RULE}", "One.") == ["line 2, no longer valid:", "-Before anything is deleted, moved, ..."]
    # Not if another line begins so.
    assert diff(f"{RULE} Yes.\n{RULE}", f"{RULE} Yes.") == ["line 2, no longer valid:", f"-{RULE}"]
    # Of five such lines the ends are told.
    told = diff("\n".join(["One.", *(f"{n}. {RULE}" for n in range(5))]), "One.")
    assert told is not None and told[2] == "(-3 more lines, down to)" and len(told) == 4


def test_many_changed_lines_of_many_equal_words_are_told_in_bounded_time():
    old, new = (
        "\n".join(f"number {n:04} of the rules of this house: {words}" for n in range(MAX_LINES - 2))
        for words in ("a b " * 24, "b a " * 24)
    )
    begun = time.process_time()
    told = diff(old, new)
    assert told is not None and len(told) == MAX_LINES - 1
    assert time.process_time() - begun < 20


def test_lines_that_have_changed_places_with_their_neighbours_are_told_in_bounded_time():
    old = [f"number {n} of the rules" for n in range(MAX_LINES)]
    new = [old[n ^ 1] for n in range(MAX_LINES)]
    begun = time.process_time()
    for _ in range(10):
        told = diff("\n".join(old), "\n".join(new))
        assert told is not None and applied(old, new, told) == new
    assert time.process_time() - begun < 20


PHRASES = st.lists(st.sampled_from(["one", "two", "three", "a longer part of the line that is the same in both", "x"]))


@given(PHRASES, PHRASES, st.booleans())
def test_a_line_can_be_told_from_what_is_new_in_it(old, new, within):
    """Between the parts that are told stand parts of the old line."""
    before, after = " ".join(old), " ".join(new)
    rest = after
    first, *others = changed(before, after, within=within).split("(as before)")
    assert rest.startswith(first)
    rest = rest[len(first) :]
    for part in others:
        at = rest.rindex(part) if part == others[-1] else rest.index(part, 1)
        assert rest[:at].strip() and rest[:at] in before
        rest = rest[at + len(part) :]
    assert rest == "" or not others


LINES = st.lists(
    st.sampled_from(["a", "b", "", "  c", "the line 1", "the line 2", "Mode: 1", "Mode: 2"]), min_size=1, max_size=12
)


@given(LINES, LINES)
def test_a_text_can_be_told_from_its_changes(old, new):
    told = diff("\n".join(old), "\n".join(new))
    assert told is not None and applied(old, new, told) == new


def test_a_line_of_many_quotes_or_brackets_is_told_in_bounded_time():
    begun = time.process_time()
    for sign in '"(`<':
        assert diff(f"One.\nTwo {sign * 40_000}", "One.") is not None
    assert time.process_time() - begun < 20
