from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.kvcache.pauses import Pauses, rate_of_return
from start_llm.kvcache.sessions import Claim, Sessions, Strength
from start_llm.kvcache.tree import Segment, SegmentTree
from tests.kvcache.segments import A_TOKEN, fake_tree, grow

BUDGET = 100 * A_TOKEN


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def said(tree: SegmentTree, sessions: Sessions, name: str, tokens: list[int], at: float, **about: Any) -> Segment:
    """The end of a conversation that comes to these tokens at this time."""
    end = grow(tree, tokens, used=about.pop("used", 0.0))
    sessions.add_end(name, end, at, **about)
    return end


def test_an_end_that_grew_is_an_end_no_more() -> None:
    tree, sessions = fake_tree(), Sessions(idle=60, keep=2)
    said(tree, sessions, "a", run(0, 10), at=0.0)
    second = said(tree, sessions, "a", run(0, 20), at=1.0)
    branch = said(tree, sessions, "a", [*run(0, 10), 99], at=2.0)
    assert sessions.protection(2.0).keys() == {id(second), id(branch)}
    third = said(tree, sessions, "a", [*run(0, 10), 88], at=3.0)
    assert sessions.protection(3.0).keys() == {id(branch), id(third)}


def test_an_end_that_was_left_behind_is_weaker_than_any_newest_one() -> None:
    tree, sessions = fake_tree(), Sessions(idle=600, keep=2)
    other = said(tree, sessions, "other", run(1000, 5), at=1.0)
    long = said(tree, sessions, "a", run(0, 50), used=2.0, at=2.0)
    summed_up = said(tree, sessions, "a", [*run(0, 10), *run(2000, 5)], at=3.0)
    strengths = sessions.protection(4.0)
    assert strengths[id(long)] < strengths[id(other)] < strengths[id(summed_up)]
    # Who goes back to an older end may do so again: main and sub-agent under one name.
    long = said(tree, sessions, "a", run(0, 60), used=5.0, at=5.0)
    sessions.add_end("a", grow(tree, [*run(0, 10), *run(2000, 9)]), 6.0)
    strengths = sessions.protection(7.0)
    assert strengths[id(other)] < strengths[id(long)]


def test_the_longest_unused_are_the_weakest() -> None:
    tree, sessions = fake_tree(), Sessions(idle=600, keep=2)
    ends = [grow(tree, run(n * 1000, 20)) for n in range(3)]
    for number, end in enumerate(ends):
        sessions.add_end(str(number), end, float(number))
    sessions.add_end("0", ends[0], 5.0)
    strengths = sessions.protection(60.0)  # nobody was ever silent for so long: all may return as soon
    assert [strengths[id(end)] for end in ends] == [Strength(Claim.IN_PROGRESS, 0.0, used) for used in (5.0, 1.0, 2.0)]


def test_who_comes_back_soon_is_stronger_than_who_was_used_last() -> None:
    tree, sessions = fake_tree(), Sessions(idle=6000, keep=2)
    regular, once = grow(tree, run(0, 20)), grow(tree, run(1000, 20))
    for turn in range(6):
        sessions.add_end("each 100 s", regular, 100.0 * turn)
    sessions.add_end("once", once, 530.0)
    sessions.add_end("once", once, 531.0)
    assert sessions.protection(590.0)[id(regular)] > sessions.protection(590.0)[id(once)]
    assert sessions.protection(900.0)[id(regular)] < sessions.protection(900.0)[id(once)]  # it is late


def test_pauses_are_judged_by_how_the_answer_in_front_of_them_ended() -> None:
    """Behind a call a client comes back after 5 seconds, behind a final answer after 300."""
    tree, sessions = fake_tree(), Sessions(idle=6000, keep=2)
    now, end = 0.0, grow(tree, run(0, 20))
    for _ in range(6):
        for pause, calls in ((300.0, True), (5.0, True), (5.0, False)):
            now += pause
            sessions.add_end("earlier", end, now, calls=calls)
    asks, done = grow(tree, run(1000, 20)), grow(tree, run(2000, 20))
    sessions.add_end("asks", asks, now, calls=True)
    sessions.add_end("done", done, now + 1, calls=False)
    strengths = sessions.protection(now + 3)
    assert strengths[id(asks)].returns > 5 * strengths[id(done)].returns, "though the other one was used last"
    strengths = sessions.protection(now + 290)
    assert strengths[id(asks)].returns < strengths[id(done)].returns


def test_only_a_turn_that_is_over_ends_a_pause() -> None:
    """Parts of a prompt, and prefill of a guess, are stored between two turns."""
    tree, whole, parts = fake_tree(), Sessions(idle=6000, keep=2), Sessions(idle=6000, keep=2)
    end = grow(tree, run(0, 20))
    for sessions in (whole, parts):
        for turn in range(4):
            if sessions is parts:
                for second in (1, 90, 95):
                    sessions.add_end("a", end, 100.0 * turn + second - 100, answered=False)
            sessions.add_end("a", end, 100.0 * turn)
    assert whole.protection(370.0) == parts.protection(370.0)
    assert whole.protection(370.0)[id(end)].returns > 0


def test_a_turn_that_is_stored_in_parts_goes_back_to_no_older_end() -> None:
    """Parts of a prompt are computed again where checkpoints had gone: that goes back to nothing."""
    tree, sessions = fake_tree(), Sessions(idle=6000, keep=2)
    left = said(tree, sessions, "a", [*run(0, 10), 99], at=0.0)
    sessions.add_end("a", grow(tree, run(0, 50)), 1.0)
    for tokens in (30, 60):
        sessions.add_end("a", grow(tree, run(0, tokens)), 2.0, answered=False)
    end = said(tree, sessions, "a", run(0, 70), at=3.0)
    strengths = sessions.protection(4.0)
    assert (strengths[id(left)].claim, strengths[id(end)].claim) == (0, 1)
    sessions.add_end("a", grow(tree, [*run(0, 10), 99, 98]), 5.0, answered=False)
    assert sessions.protection(6.0)[id(end)].claim == 1, "but this does"


def test_a_conversation_that_lost_its_end_is_protected_as_far_as_it_is_held() -> None:
    tree, sessions = fake_tree(longest=5), Sessions(idle=60, keep=2)
    end = said(tree, sessions, "a", run(0, 20), at=0.0)
    end.rows = None
    assert end.parent is not None and sessions.protection(1.0).keys() == {id(end.parent)}
    for segment in tree:
        segment.rows = None
    assert sessions.protection(1.0) == {}


def caller_of(sessions: Sessions, name: str, owner: str | None = None) -> str | None:
    """Which conversation is taken to have begun this one."""
    session = sessions._known.get((owner, name))
    assert session is not None
    return None if session.caller is None else session.caller[1]


def test_who_was_active_last_has_begun_the_next_and_not_who_is_eldest() -> None:
    tree, sessions = fake_tree(), Sessions(idle=600, keep=2)
    tools = run(0, 10)
    early = said(tree, sessions, "early", [*tools, 7], at=0.0, calls=True)
    main = said(tree, sessions, "main", [*tools, 1], at=5.0, calls=True)
    sessions.add_end("early", early, 6.0, calls=True)
    sessions.add_end("main", main, 8.0, calls=True)
    sessions.add_end("agent", grow(tree, [*tools, 9]), 10.0, calls=True)
    assert caller_of(sessions, "agent") == "main"


@pytest.mark.parametrize(
    ("calls", "owner", "caller"),
    [(True, "ann", "main"), (False, "ann", "main"), (None, "ann", None), (True, "bob", None), (True, None, None)],
)
def test_nobody_has_begun_another_owners_conversation_or_is_known_to_where_nobody_knows_how_answers_end(
    calls: bool | None, owner: str | None, caller: str | None
) -> None:
    tree, sessions = fake_tree(), Sessions(idle=600, keep=2)
    said(tree, sessions, "main", [*run(0, 10), 1], at=0.0, owner="ann", calls=calls)
    said(tree, sessions, "agent", [*run(0, 10), 2], at=5.0, owner=owner, calls=True)
    said(tree, sessions, "agent", [*run(0, 10), 2, 3], at=6.0, owner=owner, calls=True)
    assert caller_of(sessions, "agent", owner) == caller


def ended_beside(
    *, calls: bool = False, agent_calls: bool = False, tokens: int = 90, pause: float = 1.0, now: float = 260.0
) -> tuple[bool, bool]:
    """A conversation that answered at 0 s, one begun with the same tools at 100 s, which came back once, after `pause`
    seconds, and an unrelated one. Whether the second is weaker than the first, and than the last."""
    tree, sessions = fake_tree(), Sessions(idle=1800, keep=2)
    first, other = grow(tree, run(0, 100)), grow(tree, run(5000, 5))
    sessions.add_end("first", first, 0.0, calls=calls)
    for time in (100.0, 100.0 + pause):
        sessions.add_end("agent", grow(tree, [*run(0, 10), 7]), time, calls=agent_calls)
    agent = said(
        tree, sessions, "agent", [*run(0, 10), 7, *run(3000, tokens - 11)], at=102.0 + pause, calls=agent_calls
    )
    sessions.add_end("other", other, 160.0, calls=agent_calls)
    strengths = sessions.protection(now)
    return strengths[id(agent)] < strengths[id(first)], strengths[id(agent)] < strengths[id(other)]


def test_a_sub_agent_that_has_ended_is_weaker_than_the_larger_one_that_began_it() -> None:
    assert ended_beside() == ended_beside(calls=True) == (True, True)
    assert not ended_beside(agent_calls=True)[0], "it goes on"
    assert not ended_beside(tokens=120)[0], "it is the larger one"
    assert not ended_beside(now=601.0)[0], "the other one has been silent for too long"
    assert not ended_beside(pause=30.0)[0], "a person goes on with it"


def test_what_was_used_last_is_no_sub_agent_that_has_ended() -> None:
    """Else each turn of a new conversation would give itself up for an earlier one."""
    tree, sessions = fake_tree(), Sessions(idle=1800, keep=2)
    first, second = grow(tree, run(0, 100)), grow(tree, [*run(0, 10), 7])
    sessions.add_end("first", first, 0.0, calls=False)
    sessions.add_end("second", second, 100.0, calls=False)
    strengths = sessions.protection(101.0)
    assert strengths[id(first)] < strengths[id(second)]
    sessions.add_end("first", first, 110.0, calls=False)
    sessions.add_end("other", grow(tree, run(5000, 5)), 111.0, calls=False)
    strengths = sessions.protection(300.0)
    assert Strength(Claim.IN_PROGRESS, 0.0, 100.0) in strengths.values(), "the first one has come back"


def test_who_waits_for_a_call_has_begun_the_next_though_another_that_rests_is_alike() -> None:
    tree, sessions = fake_tree(), Sessions(idle=600, keep=2)
    tools = run(0, 10)
    sessions.add_end("rests", grow(tree, [*tools, 1]), 0.0, calls=False)
    main = said(tree, sessions, "main", [*tools, 2], at=1.0, calls=True)
    sessions.add_end("agent", grow(tree, [*tools, 3]), 2.0, calls=False)
    assert caller_of(sessions, "agent") == "main"
    sessions.add_end("another", grow(tree, [*tools, 4]), 4.0, calls=True)
    assert caller_of(sessions, "another") == "main"
    sessions.add_end("main", main, 11.0, calls=True)
    sessions.add_end("rests", grow(tree, [*tools, 1]), 12.0, calls=False)  # that one was used last
    sessions.add_end("one more", grow(tree, [*tools, 5]), 13.0, calls=False)
    assert caller_of(sessions, "one more") == "main"


def test_a_conversation_of_long_ago_called_nobody() -> None:
    tree, sessions = fake_tree(), Sessions(idle=600, keep=2)
    first, second = grow(tree, [1, 2]), grow(tree, [1, 3])
    sessions.add_end("first", first, 0.0, calls=True)
    sessions.add_end("second", second, 101.0, calls=True)
    assert caller_of(sessions, "second") is None


def test_idle_conversations_are_not_protected() -> None:
    sessions = Sessions(idle=60, keep=2)
    sessions.add_end("a", grow(fake_tree(), run(0, 10)), 0.0)
    assert len(sessions.protection(60.0)) == 1
    assert sessions.protection(60.1) == {} and sessions.protected_bytes(60.1) == 0
    for_ever = Sessions(idle=0, keep=2)
    for_ever.add_end("a", grow(fake_tree(), run(0, 10)), 0.0)
    assert len(for_ever.protection(1e9)) == 1
    none_is_kept = Sessions(idle=60, keep=0)
    none_is_kept.add_end("a", grow(fake_tree(), run(0, 10)), 0.0)
    assert none_is_kept.protection(0.0) == {}


def test_common_segments_are_counted_once() -> None:
    tree, sessions = fake_tree(), Sessions(idle=60, keep=2)
    for name, own in (("a", 500), ("b", 600)):
        sessions.add_end(name, grow(tree, [*run(0, 10), own]), 0.0)
    assert sessions.protected_bytes(0.0) == 12 * A_TOKEN


def test_the_longest_unused_name_is_forgotten() -> None:
    tree, sessions = fake_tree(), Sessions(idle=0, keep=1, most=2)
    for number in range(3):
        sessions.add_end(str(number), grow(tree, [number]), float(number))
    assert len(sessions) == 2 and [name for name, _ in sessions.ends()] == ["2", "1"]


SECONDS = st.lists(st.floats(0.1, 1e5), max_size=40)


def of(*seconds: float, most: int = 1000) -> Pauses:
    pauses = Pauses(most)
    for each in seconds:
        pauses.add(each)
    return pauses


@given(SECONDS, st.floats(0, 1e5), st.floats(0.1, 1e5), st.integers(1, 10))
def test_the_last_pauses_are_counted(seconds: list[float], silence: float, soon: float, most: int) -> None:
    lasted = [s for s in seconds[-most:] if s >= silence]
    ended, of_these, waited = of(*seconds, most=most).ended(silence, soon)
    assert (ended, of_these) == (sum(s < silence + soon for s in lasted), len(lasted))
    assert waited == pytest.approx(sum(min(s - silence, soon) for s in lasted), abs=1e-3)


@given(SECONDS, SECONDS, st.lists(st.floats(0, 1e5), max_size=5), st.floats(0, 1e5))
def test_a_rate_has_bounds(own: list[float], others: list[float], silences: list[float], silence: float) -> None:
    rate = rate_of_return(silence, of(*own), of(*own, *others), sorted(silences))
    assert 0 <= rate <= (len(own) + 10) / 40


def test_of_two_that_come_back_soon_the_quicker_one_is_stronger() -> None:
    quick, slow = of(*[5.0] * 20), of(*[35.0] * 20)
    assert rate_of_return(2.0, quick, of(), []) > 2 * rate_of_return(2.0, slow, of(), [])


@given(SECONDS, st.floats(0, 1e5), st.floats(0, 1e5))
def test_who_is_silent_for_longer_than_anybody_ever_was_comes_back_last(
    seconds: list[float], silence: float, more: float
) -> None:
    everyone, longest = of(*seconds), max(seconds, default=0.0)
    beyond = rate_of_return(longest + more + 0.1, of(), everyone, [])
    assert beyond == 0 <= rate_of_return(silence, of(), everyone, [])


def test_habits_of_a_conversation_outweigh_those_of_others() -> None:
    everyone = of(*[10.0] * 100)
    timer = of(*[600.0] * 20)
    assert rate_of_return(580.0, timer, everyone, []) > rate_of_return(580.0, of(), everyone, [])
    assert rate_of_return(100.0, timer, everyone, []) < rate_of_return(5.0, of(), everyone, [])


def test_a_silence_that_goes_on_counts_as_a_pause_that_has_not_ended() -> None:
    everyone = of(*[10.0, 100.0] * 5)
    assert rate_of_return(90.0, of(), everyone, [90.0] * 5) < rate_of_return(90.0, of(), everyone, [90.0])
