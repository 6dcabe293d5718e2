"""Which places of an answer are landmarks."""

from start_llm.engine.decode.landmarks import LONGEST_LEAD, Landmarks

MARK = 7
LEAD = [MARK, *range(20, 30)]


def known(*leads: list[int]) -> Landmarks:
    landmarks = Landmarks(frozenset({MARK}))
    for lead in leads:
        landmarks.learn([1, 2, *lead])
    return landmarks


def test_a_mark_is_a_landmark_wherever_it_stands() -> None:
    assert known().at_end([1, MARK]) and known().at_end([MARK])
    assert not known().at_end([MARK, 1]) and not Landmarks().at_end([MARK])


def test_a_lead_is_a_landmark_once_a_request_has_parted_there() -> None:
    assert not known().at_end(LEAD)
    assert known(LEAD).at_end([5, *LEAD]) and known(LEAD).at_end(LEAD)
    assert not known(LEAD).at_end([5, *LEAD[:-1]]) and not known(LEAD).at_end([MARK, *LEAD[2:]])


def test_a_lead_begins_with_the_last_mark() -> None:
    assert known([MARK, 3, *LEAD]).at_end(LEAD)


def test_what_is_near_to_a_mark_or_far_from_any_is_no_lead() -> None:
    for lead in (LEAD[:4], [MARK, *range(20, 20 + LONGEST_LEAD)]):
        assert not known(lead).at_end(lead)


def test_the_first_landmark_of_a_draft_may_begin_in_front_of_it() -> None:
    assert known(LEAD).first([5, *LEAD[:4]], [*LEAD[4:], 9, MARK]) == len(LEAD) - 5
    longest = [MARK, *range(20, 19 + LONGEST_LEAD)]
    assert known(longest).first([5, *longest[:-1]], longest[-1:]) == 0
    assert known(LEAD).first([5], [8, 9, MARK]) == 2
    assert known(LEAD).first([5], [LEAD[-1], 9]) is None and known(LEAD).first([], []) is None


def test_leads_that_are_used_stay() -> None:
    others = [[MARK, *range(number, number + 10)] for number in range(100, 140)]
    landmarks = known(LEAD)
    for lead in others:
        landmarks.learn(lead)
        assert landmarks.at_end(LEAD)
    assert not landmarks.at_end(others[0]) and landmarks.at_end(others[-1])
    eldest = next(lead for lead in others if lead[-1] in landmarks._ends)
    landmarks.learn(eldest)  # no state was kept there, and a request has parted there again
    for number in range(200, 205):
        landmarks.learn([MARK, *range(number, number + 10)])
    assert landmarks.at_end(eldest)
