"""Calls and results in the order that templates with one call in a message want."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.prompt.fit import interleaved
from start_llm.prompt.probe import probe
from start_llm.prompt.render import Renderer
from tests.prompt.models import model

USER = Message("user", "Look at both.")
A, B, C = (ToolCall(f"call_{name}", f"read_{name}", f'{{"path": "{name}"}}') for name in "abc")


def result(call: ToolCall | None, text: str) -> Message:
    return Message("tool", text, tool_call_id=call.id if call else None)


def alone(call: ToolCall) -> Message:
    return Message("assistant", tool_calls=(call,))


TURN = Message("assistant", "Both.", reasoning="why", tool_calls=(A, B))
FIRST = Message("assistant", "Both.", reasoning="why", tool_calls=(A,))


def test_each_call_is_followed_by_its_own_result() -> None:
    after = Message("assistant", "Done.")
    for results in ([result(A, "one"), result(B, "two")], [result(B, "two"), result(A, "one")]):
        shown = interleaved((USER, TURN, *results, after))
        assert shown == (USER, FIRST, result(A, "one"), alone(B), result(B, "two"), after)


def test_results_without_an_id_go_in_order() -> None:
    shown = interleaved((TURN, result(None, "one"), result(None, "two"), result(None, "three")))
    assert shown == (FIRST, result(None, "one"), alone(B), result(None, "two"), result(None, "three"))


def test_missing_and_strange_results() -> None:
    stranger = result(C, "three")
    assert interleaved((TURN, stranger, result(B, "two"), USER)) == (FIRST, alone(B), result(B, "two"), stranger, USER)
    assert interleaved((TURN, USER, result(A, "late"))) == (FIRST, alone(B), USER, result(A, "late"))
    assert interleaved((TURN,)) == (FIRST, alone(B))


def test_one_call_is_left_alone() -> None:
    messages = (USER, alone(A), result(A, "one"), result(A, "again"), USER)
    assert interleaved(messages) == messages


MESSAGES = st.lists(
    st.one_of(
        st.just(USER),
        st.lists(st.sampled_from([A, B, C]), max_size=3).map(
            lambda calls: Message("assistant", tool_calls=tuple(calls))
        ),
        st.sampled_from([A, B, C, None]).map(lambda call: result(call, "x")),
    ),
    max_size=10,
)


@given(MESSAGES)
def test_nothing_is_lost_and_doing_it_twice_changes_nothing(messages: list[Message]) -> None:
    shown = interleaved(messages)
    assert interleaved(shown) == shown
    assert all(len(message.tool_calls) < 2 for message in shown)
    for kind in ("user", "tool"):
        before, after = ([m for m in some if m.role == kind] for some in (messages, shown))
        assert sorted(map(repr, before)) == sorted(map(repr, after))
    before, after = ([call for m in some for call in m.tool_calls] for some in (messages, shown))
    assert before == after


def test_gpt_oss_names_each_result_after_its_own_call() -> None:
    template, tokenizer = model("harmony")
    renderer = Renderer(template, probe(template, tokenizer), preserve_thinking=True)
    tools = tuple(Tool(call.name, "", {"type": "object", "properties": {}}) for call in (A, B))
    messages = (USER, TURN, result(A, "one"), result(B, "two"))
    text = renderer.render(messages, tools, {}).text
    found = [text.index(word) for word in ("to=functions.read_a", "functions.read_a to=assistant", "one")]
    found += [text.index(word) for word in ("to=functions.read_b", "functions.read_b to=assistant", "two")]
    assert found == sorted(found)
