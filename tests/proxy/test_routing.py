"""Which node gets a request: the whole decision, without LiteLLM and without nodes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scripts.simulate_nodes import run, simulated
from start_llm.proxy.routing import CROWDED, NEAR, SWAMPED, Load, NodePicker, RouteKey, fields_of, route_key

NODES = ("a", "b", "c")
IDLE = dict.fromkeys(NODES, Load())


def key(
    conversation: str = "c1", name: str = "", opening: str = "s", share: float = 0.8, goes_on: bool = False
) -> RouteKey:
    return RouteKey("m", tuple(each for each in (conversation, name) if each), opening, share, goes_on)


# --- the decision ---------------------------------------------------------------


def test_a_conversation_stays_where_it_is_and_moves_when_its_node_is_gone_or_swamped() -> None:
    picker = NodePicker()
    picker.remember(key(), "b", NODES)
    assert picker.home(key(), IDLE) == "b"
    assert picker.home(key("c2"), IDLE) is None
    assert picker.home(key(), IDLE | {"b": Load(running=50)}) == "b", "busy is no reason"
    assert picker.home(key(), {"a": Load(), "c": Load()}) is None
    waiting = {"a": Load(), "b": Load(8, SWAMPED), "c": Load(8, 1)}
    assert picker.home(key(), waiting) is None
    assert picker.home(key(), waiting | {"a": Load(8, 1)}) == "b", "elsewhere it would wait too"


def test_sub_agents_of_one_name_may_go_elsewhere_and_the_conversation_stays() -> None:
    picker = NodePicker()
    picker.remember(key("main", "session"), "a", NODES)
    assert picker.home(key("agent", "session"), IDLE) == "a"
    picker.remember(key("agent", "session"), "c", NODES)
    assert picker.home(key("main", "session"), IDLE) == "a"
    assert picker.home(key("main, clock changed", "session"), IDLE) == "a"
    picker.remember(key("main", "session"), "b", ["b", "c"])  # a is gone
    assert picker.home(key("main, clock changed", "session"), IDLE) == "b"


def test_a_new_one_goes_where_most_is_stored_and_nodes_that_have_nearly_as_much_share_by_load() -> None:
    picker = NodePicker()
    assert picker.choose(key(opening=""), IDLE, {"a": 100, "b": 900, "c": 500}, 1000) == "b"
    loads = {"a": Load(3), "b": Load(1), "c": Load(2)}
    assert picker.choose(key(), loads, {"a": 900, "b": 850, "c": 100}, 1000) == "b"
    assert picker.choose(key(), loads | {"b": Load(3, prefill=9)}, {"a": 900, "b": 850}, 1000) == "a"


def test_a_conversation_that_goes_on_is_found_by_a_proxy_that_does_not_know_it() -> None:
    """Its last turn is a few percent of it, and another node has all the rest: the system text, which is of many."""
    asked, loads = key(goes_on=True), IDLE | {"b": Load(4)}
    assert NodePicker().choose(asked, loads, {"a": 900, "b": 950, "c": 900}, 1000) == "b"
    assert NodePicker().choose(asked, IDLE | {"b": Load(CROWDED + 1)}, {"a": 900, "b": 950}, 1000) == "a"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "read", "arguments": "{}"}]},
    ],
)
def test_a_first_request_is_told_from_later_ones(body: dict[str, Any]) -> None:
    assert route_key(body, {}).goes_on
    first = {name: messages[:1] for name, messages in body.items()}
    assert not route_key(first, {}).goes_on and not route_key({"input": "a"}, {}).goes_on


def test_claude_codes_line_of_each_conversation_does_not_part_system_texts() -> None:
    def opening(line: str) -> str:
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You are Claude Code."}]
        return route_key({"system": system, "messages": [{"role": "user", "content": "a"}]}, {}).opening

    header = "x-anthropic-billing-header: cc_version=2.1.329"
    assert opening(f"{header}.e91; cch=0ab;") == opening(f"{header}.c82; cch=fed;") != opening("Be brief.")


def test_what_a_node_is_computing_counts_as_stored() -> None:
    """Four conversations with one system text begin at once: nothing is stored yet, and one node computes it."""
    picker, seen = NodePicker(), []
    for number in range(4):
        asked = key(f"c{number}")
        loads = IDLE | ({seen[0]: Load(running=number)} if seen else {})
        seen.append(picker.choose(asked, loads, {}, 1000))
        picker.remember(asked, seen[-1], NODES)
    assert len(set(seen)) == 1


def test_different_system_texts_spread() -> None:
    picker = NodePicker()
    chosen = []
    for number in range(6):
        asked = key(f"c{number}", opening=f"s{number % 3}")
        chosen.append(picker.choose(asked, IDLE, {}, 0))
        picker.remember(asked, chosen[-1], NODES)
    assert chosen[:3] == chosen[3:] and sorted(chosen[:3]) == sorted(NODES)


LOADS = st.dictionaries(
    st.sampled_from(NODES), st.builds(Load, *[st.integers(0, 40)] * 3), min_size=1, max_size=len(NODES)
)


@given(LOADS, st.dictionaries(st.sampled_from(NODES), st.integers(0, 5000)), st.integers(0, 5000), st.data())
def test_always_one_that_is_offered(
    loads: dict[str, Load], stored: dict[str, int], prompt: int, data: st.DataObject
) -> None:
    picker = NodePicker()
    for name in data.draw(st.lists(st.sampled_from(NODES), max_size=4)):
        picker.remember(key(data.draw(st.sampled_from(["x", "y"]))), name, NODES)
    home = picker.home(key("x"), loads)
    assert home is None or home in loads
    chosen = picker.choose(key("z", opening="other"), loads, stored, prompt)
    assert chosen in loads
    least = min(load.requests for load in loads.values())
    assert loads[chosen].requests <= max(least + CROWDED, 2 * least)
    free = [name for name, load in loads.items() if load.requests <= max(least + CROWDED, 2 * least)]
    best = max(stored.get(name, 0) for name in free)
    assert stored.get(chosen, 0) >= best - NEAR * (prompt or 1000)


@given(LOADS, st.integers(0, 5000))
def test_two_proxies_that_know_nothing_decide_alike(loads: dict[str, Load], prompt: int) -> None:
    assert NodePicker().choose(key(), loads, {}, prompt) == NodePicker().choose(key(), loads, {}, prompt)


# --- what of a request decides ----------------------------------------------------


CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": "Fix it."}],
}
LATER = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]


def test_a_conversation_is_known_by_its_beginning() -> None:
    first, later = route_key(CHAT, {}), route_key(CHAT | {"messages": CHAT["messages"] + LATER}, {})
    assert first.conversation == later.conversation and len(first.conversation) == 1
    other = {"messages": [CHAT["messages"][0], {"role": "user", "content": "Build it."}]}
    assert route_key(CHAT | other, {}).conversation != first.conversation
    assert route_key(CHAT | other, {}).opening == first.opening


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "system": "You help.", "messages": [{"role": "user", "content": "Fix it."}]},
        {"model": "m", "system": [{"type": "text", "text": "You help."}], "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Fix it."}]}]},
        {"model": "m", "instructions": "You help.", "input": "Fix it."},
        {"model": "m", "instructions": "You help.", "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "Fix it."}]}]},
    ],
)  # fmt: skip
def test_dialects_are_read_alike(body: dict[str, Any]) -> None:
    assert route_key(body, {}) == route_key(CHAT, {})


def test_a_clock_in_the_system_text_changes_nothing() -> None:
    def at(time: str) -> RouteKey:
        return route_key({"system": f"It is {time}.", "messages": [{"role": "user", "content": "hi"}]}, {})

    assert at("10:05") == at("23:59")
    first, later, other = (at(time).conversation for time in ("2026-11-23 10:05", "2026-12-01 9:07", "never"))
    assert first == later != other


@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ({"session_id": "s1"}, {}),
        ({"metadata": {"thread_id": "s1"}}, {}),
        ({"extra_body": {"chat_id": "s1"}}, {}),
        ({"metadata": {"user_id": "user_1_account__session_00ff"}}, {}),
        ({"metadata": {"user_id": '{"device_id": "d", "session_id": "s1"}'}}, {}),
        ({}, {"x-session-id": "s1"}),
    ],
)
def test_names_of_conversations(more: dict[str, Any], headers: dict[str, str]) -> None:
    named = route_key(CHAT | more, headers)
    changed = {"messages": [{"role": "user", "content": "a summary of it all"}]}
    later = route_key(CHAT | more | changed, headers).conversation
    assert len(named.conversation) == 2 and named.conversation[1] in later


@pytest.mark.parametrize("more", [{"user": "u"}, {"metadata": {"user_id": "u"}}, {"prompt_cache_key": "k"}])
def test_names_of_people_are_none(more: dict[str, Any]) -> None:
    assert route_key(CHAT | more, {}) == route_key(CHAT, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab{"é😀', max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab{"é😀', max_size=9), inner, max_size=3),
    max_leaves=9,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(("role", "type", "content", "text")), JSON, max_size=4), max_size=3)
FIELDS = ("model", "messages", "system", "input", "instructions", "tools", "metadata", "extra_body", "prompt")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | MESSAGES))
@example({"messages": [{"role": [], "content": "x"}]})
@example({"input": [{"type": {}, "role": {}}]})
def test_whatever_stands_in_a_body(body: dict[str, Any]) -> None:
    found = route_key(body, {})
    assert 0 <= found.opening_share <= 1 and len(found.conversation) <= 2


@pytest.mark.parametrize("body", [b"", b"[1]", b"1", b"{", b"\xff", b"[" * 200_000])
def test_a_body_that_is_no_object_has_no_fields(body: bytes) -> None:
    assert fields_of(body, is_json=True) == {}


def test_the_model_that_a_form_names() -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain'
    assert fields_of(head + b"\r\n\r\nwhisper-1\r\n--x--\r\n", is_json=False) == {"model": "whisper-1"}
    assert fields_of(b"--x--\r\n", is_json=False) == {}


@pytest.mark.timeout(60)
def test_a_form_that_is_full_of_names_is_read_at_once() -> None:
    """An expression that tries each of these takes the square of their number: hours."""
    assert fields_of(b'name="model"\r\n' * 1_000_000, is_json=False) == {}


RUNS = 20
WORK = {"nodes": 3, "conversations": 12, "systems": 3, "turns": 8, "at_once": 4, "late": 0.05}


@pytest.mark.thorough
def test_nine_runs_of_ten_compute_little_more_than_one_node_and_are_balanced() -> None:
    options = argparse.Namespace(**WORK, proxies=1)
    found = [simulated(run(options, seed)) for seed in range(RUNS)]
    good = sum(outcome.computed <= 1.05 and outcome.requests <= 1.2 for outcome in found)
    assert good >= RUNS * 0.9, [outcome for outcome in found if outcome.computed > 1.05 or outcome.requests > 1.2]
