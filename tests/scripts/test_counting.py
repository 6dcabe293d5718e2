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


CALL = {"tool_calls": [{"function": {"name": "ls", "arguments": '{"a":2,"b":1}'}}]}


def test_an_appended_message_costs_itself_and_the_generation_prompt(books: NewTokens) -> None:
    units = request_units([*history(reasoning_content="let me think", **CALL), say("user", "four")])
    assert books.new(units) == books.price([HEADER, "four\n", END, "<|im_start|>assistant\n"])


@pytest.mark.parametrize("arguments", ['{"a":2,"b":1}', '{"b": 1, "a": 2}', {"a": 2, "b": 1}])
def test_the_way_arguments_are_written_costs_nothing(books: NewTokens, arguments: Any) -> None:
    call = {"tool_calls": [{"function": {"name": "ls", "arguments": arguments}}]}
    units = request_units(history(reasoning_content="let me think", **call))
    assert books.new(units) == books.price(["<|im_start|>assistant\n"])


def test_stripped_and_doubled_reasoning_cost_nothing(books: NewTokens) -> None:
    stripped = request_units(history(**CALL))
    doubled = history(reasoning_content="let me think", **CALL)
    doubled[-1]["content"] = "<think>\nlet me think\n</think>\n\nfine thanks"
    assert books.new(stripped) == books.new(request_units(doubled)) == books.price(["<|im_start|>assistant\n"])


def test_a_changed_line_costs_that_line(books: NewTokens) -> None:
    units = request_units(history("Be good.\nTime is 10:06 now.", reasoning_content="let me think", **CALL))
    assert books.new(units) == books.price(["Time is 10:06 now.\n", "<|im_start|>assistant\n"])


def test_an_insertion_costs_what_was_inserted(books: NewTokens) -> None:
    messages = history(reasoning_content="let me think", **CALL)
    messages.insert(1, say("user", "by the way"))
    assert books.new(request_units(messages)) == books.price([HEADER, "by the way\n", END, "<|im_start|>assistant\n"])


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
