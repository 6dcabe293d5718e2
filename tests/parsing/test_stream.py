from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.core.events import TextDelta
from start_llm.parsing.output import CodeTracker
from start_llm.parsing.stream import OutputParser
from tests.kinds import rounds
from tests.parsing.helpers import TOOLS, calls, run, style

PIECES = st.sampled_from([
    "<think>", "</think>", "\n", "\n\n", " ", "a", "Hello.", "`", "```", "```json\n", "STOP", "ST", "é", "\\", '"',
    "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>", "assistant\n", "<", "</", "{", "}", "'", ",",
    '{"name": "read", "arguments": {"path": "a"}}', '{"name": "bash", "arguments": {"command": "ls',
    "<function=read>", "</function>", "<parameter=path>", "</parameter>", "<parameter=limit>", "5",
    "<thinking>", "</thinking>", "<tool_response>", "user\n", "<|start_header_id|>", "<|end_header_id|>", "x",
    "read", "bash", "nope", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "path", '"name": "now"',
    '"arguments": ', "true", "None", "[", "]", ":", "<name>", "</name>", "<arguments>", "</arguments>",
])  # fmt: skip
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TEXTS = st.lists(PIECES, max_size=25).map("".join)


@settings(max_examples=rounds(150), deadline=None)
@given(TEXTS, st.data(), st.booleans(), st.booleans(), st.sampled_from([(), ("STOP",), ("\n\n", "STO")]))
def test_any_chunking_gives_the_same(
    text: str, data: st.DataObject, inside: bool, whole: bool, stop: tuple[str, ...]
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    at_once = run(text, in_reasoning=inside, stop=stop, whole=whole)
    for chunking in (cuts, 1):
        streamed = run(text, chunking, in_reasoning=inside, stop=stop, whole=whole)
        assert streamed[1:] == at_once[1:]


@settings(max_examples=rounds(100), deadline=None)
@given(TEXTS, st.booleans())
def test_only_a_stray_end_tag_tells_a_whole_answer_from_a_stream(text: str, inside: bool) -> None:
    form = style()
    streamed = run(text, 3, form=form, in_reasoning=inside)
    stray = form.stray_ends.likely
    whole = run(text, 3, in_reasoning=inside, whole=True)
    if not stray:
        assert streamed[1:] == whole[1:]
    assert streamed[1].tool_calls == whole[1].tool_calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("hm</think>Hi", "Hi", "hm"),
        ("\nhm,\nhm\n</think>\n\nHi", "Hi", "hm,\nhm"),
        ("hm</think>\nHi</think>\nyou", "Hiyou", "hm"),
        ("I say </think> here.\n</think>\nHi", "Hi", "I say </think> here."),
        ("Hi `</think>` you", "Hi `</think>` you", None),
        ("Hi <think>hm</think> you", "Hi  you", "hm"),
        ("</think>Hi", "Hi", None),
        ("Hi", "Hi", None),
    ],
)
def test_a_whole_answer_with_a_thought_that_nobody_opened(text: str, content: str, reasoning: str | None) -> None:
    for cuts in ((), 1, 3):
        parsed = run(text, cuts, whole=True)[1]
        assert (parsed.content, parsed.reasoning) == (content, reasoning)


def test_a_call_ends_the_wait_for_a_stray_end_tag() -> None:
    text = f"Look:\n{CALL}\n</think>\nHi"
    for cuts in ((), 1):
        parsed = run(text, cuts, whole=True)[1]
        assert (parsed.content, parsed.reasoning, calls(parsed)) == ("Look:", None, [("now", {})])


def test_a_model_that_closes_what_nobody_opened_is_waited_for_the_next_times() -> None:
    form = style()
    first = run("hm\n</think>\n\nHi", 1, form=form)[1]
    assert (first.content, first.reasoning) == ("hm\nHi", None), "it was sent already"
    second = run("hm\n</think>\n\nHi", 1, form=form)[1]
    assert (second.content, second.reasoning) == ("Hi", "hm")
    assert run(f"Look.\n{CALL}", 1, form=form)[1].content == "Look."
    streams = [len(run("plain text and more", 1, form=form)[0]) for _ in range(12)]
    assert streams[0] == 1 and streams[-1] > 10, "it has lost the habit: text is sent at once again"


def test_thoughts_are_only_waited_for_where_they_may_come() -> None:
    form = style()
    form.stray_ends.seen()
    assert len(run("hm</think>plain text", 1, form=form, in_reasoning=True)[0]) > 10
    assert len(run("plain text", 1, form=style("hermes_json", "null"), whole=False)[0]) > 5


def test_stop_string_over_chunks_never_leaks() -> None:
    events, parsed, stopped = run("<think>STOP</think>one ST two STOP three", 1, stop=["STOP"])
    assert (parsed.content, parsed.reasoning, stopped) == ("one ST two ", "STOP", "STOP")
    assert all("STO" not in event.text for event in events if isinstance(event, TextDelta))


def test_a_stop_string_inside_a_call_is_an_argument() -> None:
    _, parsed, stopped = run('<tool_call>{"name": "bash", "arguments": {"command": "STOP"}}</tool_call>', stop=["STOP"])
    assert calls(parsed) == [("bash", {"command": "STOP"})]
    assert stopped is None


@pytest.mark.parametrize("stop", ["STOP", "\n", "</tool_call>", "now"])
def test_behind_a_call_stop_strings_do_not_count(stop: str) -> None:
    """Nothing is visible there. And a client that is told of a stop string does not run the call."""
    for cuts in ((), 1):
        text = f"{CALL}\nSTOP now\n" + CALL.replace("now", "bash") + "\nSTOP"
        _, parsed, stopped = run(text, cuts, stop=[stop])
        assert (calls(parsed), stopped, parsed.content) == ([("now", {}), ("bash", {})], None, "")


def test_a_stop_string_ends_the_text_before_a_call() -> None:
    for cuts in ((), 1):
        _, parsed, stopped = run(f"One.\nSTOP\n{CALL}", cuts, stop=["STOP"])
        assert (parsed.content, calls(parsed), stopped) == ("One.\n", [], "STOP")


def test_a_stop_string_that_is_part_of_a_marker_ends_the_text_first() -> None:
    for cuts in ((), 1):
        assert run(f"a {CALL}", cuts, stop=["<tool"])[2] == "<tool"
        assert run("a </think> b", cuts, stop=["</think>"])[1].content == "a "
        assert run("<think>a</think>b", cuts, stop=["</think>"])[1:] == run("<think>a</think>b", cuts)[1:]


def test_a_stop_string_in_a_thought_that_nobody_opened() -> None:
    """Held back, it may still be visible text: the client asked for an end there."""
    _, parsed, stopped = run("hm STOP\n</think>\nHi", 1, stop=["STOP"], whole=True)
    assert (parsed.content, parsed.reasoning, stopped) == ("hm ", None, "STOP")


def test_what_is_left_out_is_known() -> None:
    """The generated tokens of such an answer must not stand in the next prompt: the client knows less."""
    for text, faithful in (
        ("Look.\n" + CALL + "\n", True),
        ("<think>hm</think>Look.<|im_end|>", True),
        (CALL + "\nIt is noon.", False),
        (CALL + "\n" + CALL, True),
        ("<think>\n" + CALL + "\n</think>\n" + CALL, False),
        (CALL + "\n" + CALL.replace("now", "bash"), True),
    ):
        parser = OutputParser(style(), tools=TOOLS)
        parser.feed(text)
        parser.finish()
        assert parser.faithful == faithful, text


def test_after_a_stop_string_nothing_comes() -> None:
    parser = OutputParser(style(), stop=["END"])
    parser.feed("a END b")
    assert (parser.feed("c"), parser.finish(), parser.stopped, parser.ended) == ([], [], "END", True)


def test_without_tools_markup_is_text() -> None:
    text = '<tool_call>{"name": "bash", "arguments": {}}</tool_call> <function=bash>'
    assert run(text, tools=())[1].content == text
    assert run(text, tool_calls=False)[1].content == text


TURNS = ("<|im_end|>", "<|im_start|>assistant\n", "<|im_start|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", *TURNS)


@settings(max_examples=rounds(150), deadline=None)
@given(
    st.lists(st.sampled_from([*MARKUP, "\n", " ", "one", "two {", "}", "`x`", "<b>", "3 < 4", "```\n"]), max_size=20)
)
def test_nothing_is_lost(pieces: list[str]) -> None:
    """Where there is no call, every character that is no tag and no white space comes out, in its order."""
    text = "".join(pieces)
    parsed = run(text)[1]
    kept = [text, parsed.content, parsed.reasoning or ""]
    for markup in MARKUP:
        kept = [part.replace(markup, "") for part in kept]
    source, content, reasoning = ("".join(part.split()) for part in kept)
    assert sorted(content + reasoning) == sorted(source)
    assert is_subsequence(content, source)
    assert is_subsequence(reasoning, source)


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(char in rest for char in part)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "start",
    [
        "",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "content": "',
        "<tool_call><function=write><parameter=content>",
        "<tool_call>write<arg_key>content</arg_key><arg_value>",
    ],
)
def test_long_output_is_not_kept_for_reading_again(start: str, inside: bool) -> None:
    parser = OutputParser(style(), tools=TOOLS, in_reasoning=inside)
    parser.feed(("hm</think>" if inside else "") + start)
    for _ in range(2000):
        parser.feed("some words < more. ")
        assert len(parser._source.text) < 100


def test_choices_and_ids() -> None:
    parser = OutputParser(style(), tools=TOOLS, choice=2)
    events = parser.feed('Hi <tool_call>{"name": "now"}</tool_call><tool_call>{"name": "bash"}</tool_call>')
    assert {event.choice for event in events} == {2}
    first, second = parser.parsed().tool_calls
    assert first.id != second.id
    assert first.id.startswith("call_")


@pytest.mark.parametrize("ends", [True, False], ids=["finished", "left"])
def test_a_parser_is_freed_with_its_request_and_not_at_the_next_collection(ends: bool):
    parser = OutputParser(style(), tools=TOOLS)
    freed = weakref.ref(parser)
    gc.disable()
    try:
        parser.feed('Yes. <tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call> <tool')
        if ends:
            parser.finish()
        del parser
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("plain ", False),
        ("a `", True),
        ("a `b` ", False),
        ("a `b\n", False),
        ("``a ` ", True),
        ("```py\ncode ", True),
        ("```py\ncode\n```\n", False),
        ("  ```py\ncode ", True),
        ("````\n```\nstill ", True),
        ("text ```sh\ncode ", True),
        ("- ```sh\n  code\n  ```\n", False),
        ("text ```sh\ncode```\n", False),
        ("```\ncode ``` more ", True),
        ("```\ncode\n```", False),
        ("```one line``` ", False),
        ("```\n``` not the end\n", True),
    ],
)
def test_whether_the_text_is_inside_of_code(text: str, inside: bool) -> None:
    for size in (1, 2, len(text)):
        tracker = CodeTracker()
        for start in range(0, len(text), size):
            tracker.add(text[start : start + size])
        assert tracker.inside is inside
