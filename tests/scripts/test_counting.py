"""What the benchmark calls new."""

from typing import Any

import pytest

from scripts.bench.counting import NewTokens, assistant_units, request_units

HEADER, END = "<|im_start|>user\n", "<|im_end|>\n"


def words(text: str) -> int:
    return len(text.split())


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture
def books() -> NewTokens:
    made = NewTokens(words)
    first = request_units([say("system", "Be good.\nTime is 10:05 now."), say("user", "one two three")])
    assert made.new(first) == made.price(first)
    made.add(first, assistant_units("fine thanks", "let me think", [("ls", '{"b": 1, "a": 2}')]))
    return made


def history(system: str = "Be good.\nTime is 10:05 now.", **assistant: Any) -> list[dict[str, Any]]:
    return [say("system", system), say("user", "one two three"), say("assistant", "fine thanks", **assistant)]


CALLS = [{"tool_calls": [{"function": {"name": "ls", "arguments": arguments}}]} for arguments in
         ('{"a":2,"b":1}', '{"b": 1, "a": 2}', {"a": 2, "b": 1})]  # fmt: skip
CALL = CALLS[0]
THOUGHT = {"reasoning_content": "let me think"}
SAME = history(**THOUGHT, **CALL)
DOUBLED = {**SAME[2], "content": "<think>\nlet me think\n</think>\n\nfine thanks"}


@pytest.mark.parametrize(
    ("messages", "costs"),
    [
        pytest.param([*SAME, say("user", "four")], [HEADER, "four\n", END], id="an appended message"),
        *(pytest.param(history(**THOUGHT, **call), [], id="the way arguments are written") for call in CALLS),
        pytest.param(history(**CALL), [], id="stripped reasoning"),
        pytest.param([*SAME[:2], DOUBLED], [], id="doubled reasoning"),
        pytest.param(
            history("Be good.\nTime is 10:06 now.", **THOUGHT, **CALL), ["Time is 10:06 now.\n"], id="a changed line"
        ),
        pytest.param([SAME[0], say("user", "by the way"), *SAME[1:]], [HEADER, "by the way\n", END], id="an insertion"),
    ],
)
def test_what_a_change_costs(books: NewTokens, messages: list[dict[str, Any]], costs: list[str]) -> None:
    """Itself, and the generation prompt."""
    assert books.new(request_units(messages)) == books.price([*costs, "<|im_start|>assistant\n"])


def test_a_changed_answer_costs_what_was_changed(books: NewTokens) -> None:
    messages = history(**CALL)
    messages[-1]["content"] = "not what was said"
    assert books.new(request_units(messages)) >= words("not what was said")


def test_tools_in_another_order_cost_nothing() -> None:
    books, messages = NewTokens(words), [say("user", "hi")]
    tools = [{"function": {"name": name, "description": f"the tool {name}"}} for name in "abc"]
    books.add(request_units(messages, tools), [])
    assert books.new(request_units(messages, tools[::-1])) == 1


def test_what_another_conversation_quotes_is_new(books: NewTokens) -> None:
    units = request_units([say("system", "Write a title."), say("user", "one two three")])
    assert books.new(units) == books.price(units)


def test_the_closest_earlier_request_counts() -> None:
    books = NewTokens(words)
    for text in ("a b c", "d e f", "g h i"):
        books.add(request_units([say("user", text)]), [])
    assert books.new(request_units([say("user", "d e f"), say("user", "j")])) < words("d e f") + 4
