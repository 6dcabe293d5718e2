"""Small questions are computed in front of long prompts. Arithmetic only: `Prompts.next` and `Scheduler._admit` choose
by it. Model thread.

An agent asks small things beside its conversation: may this tool run, what is a title, how does this line go on. It
waits for the answer, and gives up when that comes late. So a question goes first, unless questions have had more than
their share of the time: then the long prompts go on until they are even.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from start_llm.core.work import Submit

URGENT_TOKENS = 2048  # of a prompt that are to be computed
URGENT_ANSWER = 1024  # tokens of an answer, where a client says by that number that it wants little
URGENT_SHARE = 0.35  # of the time of questions and all others together
_AT_ONCE = 14.0  # seconds that questions may take before that counts: six that come together
_EXPECTED = 600.0  # seconds after a question in which another one may come


class UrgentShare:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._owed = 0.0  # seconds that the long prompts are behind
        self._seen = -math.inf

    @property
    def goes_first(self) -> bool:
        """Whether a question is computed before a long prompt."""
        return self._owed < _AT_ONCE

    @property
    def is_expected(self) -> bool:
        """A question may come soon: no chunk should take long."""
        return self._clock() - self._seen < _EXPECTED

    def came(self) -> None:
        """A question is here."""
        self._seen = self._clock()

    def took(self, seconds: float, *, urgent: bool) -> None:
        """A question, or a long prompt, has had so much time while a long prompt was there."""
        change = seconds if urgent else -seconds * URGENT_SHARE / (1 - URGENT_SHARE)
        self._owed = max(0.0, self._owed + change)


def is_question(work: Submit, tokens: int) -> bool:
    """`tokens`: of the prompt, that are to be computed."""
    return tokens <= URGENT_TOKENS and (work.one_shot or work.max_tokens <= URGENT_ANSWER)
