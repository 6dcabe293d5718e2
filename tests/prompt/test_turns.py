"""The memory of turn records: what is found, what goes first, and many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from start_llm.core.messages import Message
from start_llm.prompt.turns import Generation, Open, Record, TurnMemory, with_generation
from tests.prompt.client import BASH, EDIT, READ, Client, pipeline, say
from tests.prompt.models import model


def record(*links: str, tools=(READ,), text: str = "text", tokens: int = 10) -> Record:
    chain = tuple(link.encode() for link in links)
    return Record((), chain, tuple(tools), text, tuple(range(tokens)), (), (Open(len(chain), 0, tokens),))


def spoken(word: str, *tokens: int) -> Generation:
    return Generation(word.encode(), word, "", (), tokens)


def test_the_deepest_shared_part_is_found():
    memory = TurnMemory()
    short, _ = memory.put(record("a", "b"))
    deep, _ = memory.put(record("a", "b", "c", "d"))
    assert memory.find([b"a", b"b", b"x"], [None] * 3, (READ,))[2] == 2
    assert memory.find([b"a", b"b", b"c", b"y"], [None] * 4, (READ,))[::2] == (deep, 3)
    assert memory.find([b"z"], [None], (READ,)) is None
    assert short != deep


def test_the_record_that_said_it_is_preferred_then_the_same_tools_then_the_newest():
    memory = TurnMemory()
    said, _ = memory.put(with_generation(record("a", tools=(BASH,)), spoken("hello", 1, 2)))
    tooled, _ = memory.put(record("a", tools=(EDIT,)))
    newest, _ = memory.put(record("a", tools=(READ,)))
    chain, plain = [b"a", b"b"], [None, None]
    assert memory.find(chain, [None, b"hello"], (EDIT,))[0] == said
    assert memory.find(chain, plain, (EDIT,))[0] == tooled
    assert memory.find(chain, plain, (BASH, READ))[0] == newest


def test_an_extension_replaces_and_anything_else_does_not():
    memory = TurnMemory()
    first, _ = memory.put(record("a", "b"))
    other_tools, gone = memory.put(record("a", "b", "c", tools=(BASH,)), replaces=first)
    assert gone == []
    branch, gone = memory.put(record("a", "x"), replaces=first)
    assert gone == []
    _, gone = memory.put(record("a", "b", "c"), replaces=first)
    assert gone == [first] and len(memory) == 3
    assert {other_tools, branch} < {record_id for record_id, _ in memory.records()}


def test_bytes_are_bounded_and_the_least_used_goes():
    one = record("a", text="x" * 10_000)
    memory = TurnMemory(limit_bytes=3 * one.size + 100)
    ids = [memory.put(record(name, text="x" * 10_000))[0] for name in "abc"]
    assert memory.find([b"a"], [None], ()) is not None
    _, gone = memory.put(record("d", text="x" * 10_000))
    assert gone == [ids[1]] and memory.used_bytes <= 3 * one.size + 100
    assert memory.find([b"b"], [None], ()) is None and memory.find([b"a"], [None], ()) is not None
    for link in (b"a", b"c", b"d"):
        assert memory._index[link]
    assert b"b" not in memory._index


def test_one_record_over_the_limit_is_still_kept():
    memory = TurnMemory(limit_bytes=10)
    memory.put(record("a"))
    memory.put(record("b"))
    assert len(memory) == 1 and memory.find([b"b"], [None], ()) is not None


def test_answers_of_one_prompt_are_bounded_and_not_doubled():
    made = record("a")
    for number in range(20):
        made = with_generation(made, spoken(f"w{number}", number))
    made = with_generation(made, spoken("w19", 19))
    assert len(made.opens[-1].generations) == 8
    assert made.generation(1, b"w19") is not None and made.generation(1, b"w0") is None


def test_many_threads_at_once():
    """Conversations on one pipeline, each in its own thread, come out as if each were alone."""
    shared = pipeline("qwen35")

    def talk(number: int, pipe) -> list[tuple[int, ...]]:
        client = Client("qwen35", pipe)
        prompts = [client.ask(Message("system", "Help."), Message("user", f"Task {number % 4}")).prompt.tokens]
        for step in range(5):
            client.answer(say(f"Step {step} of {number}", f"why {number}", bash={"command": f"ls {number}"}))
            prompts.append(client.ask(Message("tool", f"r{step}", tool_call_id="call_bash")).prompt.tokens)
            assert prompts[-1][: len(client.spoken)] == client.spoken
        return prompts

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda number: talk(number, shared), range(12)))
    for number, prompts in enumerate(together):
        assert prompts == talk(number, pipeline("qwen35"))


def test_a_transient_message_that_the_template_joins_has_no_place_of_its_own():
    from tests.prompt.test_append import INTERNAL

    for family, has in (("chatml", True), ("gemma", False)):
        client = Client(family, pipeline(family), tools=())
        prompt = client.ask(Message("user", "Go"), Message("user", INTERNAL.format("x"))).prompt
        assert (prompt.transient is not None) is has
        assert "Active sessions" in model(family)[1].decode(prompt.tokens)
