"""Which stored ends belong to which conversation, and how strongly they are protected."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from start_llm.files.lru import Lru
from start_llm.kvcache.pauses import Pauses, rate_of_return
from start_llm.kvcache.tree import Segment

_USUAL_IDLE = 1800.0  # seconds, where conversations never lose their protection
_PERSON = 20.0  # seconds; who went on with a final answer later than that was a person, so this is no sub-agent
_PAUSES = 4096  # of all conversations
_OWN_PAUSES = 128


def _pauses(most: int) -> dict[bool, Pauses]:
    """By whether the answer in front of a pause was final."""
    return {False: Pauses(most), True: Pauses(most)}


Key = tuple[str | None, str]
"""Owner and name of a conversation: two owners may have chosen the same name."""


class Claim(IntEnum):
    """Why KV is protected, the weakest first."""

    NONE = -1
    LEFT = 0  # its conversation left it behind
    IN_PROGRESS = 1


@dataclass(frozen=True, slots=True, order=True)
class Strength:
    """How strongly an end is protected; greater is stronger."""

    claim: Claim
    returns: float = 0.0  # how likely its conversation comes back soon, if that is in progress
    used: float = 0.0  # last use. A sub-agent that has ended: as if long ago


UNPROTECTED = Strength(Claim.NONE)


@dataclass(slots=True, eq=False)
class Session:
    """A conversation."""

    created: float
    used: float
    ends: list[Segment] = field(default_factory=list)  # the segments where its last stored turns end, oldest first
    caller: Key | None = None  # the conversation that is taken to have begun this one, as an agent begins sub-agents
    answered: float = math.inf  # when its last turn was over; `used` moves within a turn, too
    unanswered: bool = False  # the newest end is one of a part of a turn, or of a guess
    alternates: bool = False  # it once went on from an end that was not its newest one
    calls: bool | None = None  # whether its last answer called tools; else a person goes on with it, or nobody
    pauses: dict[bool, Pauses] = field(default_factory=partial(_pauses, _OWN_PAUSES))


class Sessions:
    """Conversations in progress.

    Args:
        idle: seconds after which a conversation loses its protection (0: never).
        keep: how many of its ends are protected.
        most: conversations remembered; the one longest unused goes first.
    """

    def __init__(self, idle: float, keep: int, most: int = 4096) -> None:
        self._idle = idle
        self._keep = keep
        self._lately = (idle or _USUAL_IDLE) / 6
        self._waits_for = (idle or _USUAL_IDLE) / 3  # so long a conversation may wait for those that it began
        self._known: Lru[Key, Session] = Lru(most)
        self._pauses = _pauses(_PAUSES)

    def add_end(
        self,
        name: str,
        end: Segment,
        now: float,
        *,
        owner: str | None = None,
        answered: bool = True,
        calls: bool | None = None,
    ) -> None:
        """A turn of the owner's conversation `name` was stored up to `end`; ends that it grew out of are no ends any
        more.

        `answered`: the turn is over. Else this is a part of it, or a guess of the next one: no pause has ended.
        `calls`: its answer calls tools; ``None``: nobody knows, which counts as if it did.
        """
        key = owner, name
        if (session := self._known.get(key)) is None:
            session = Session(now, now, caller=self._likely_caller(owner, end, now))
        if answered:
            if now > session.answered:
                for pauses in (session.pauses, self._pauses):
                    pauses[session.calls is False].add(now - session.answered)
            session.answered, session.calls = now, calls
        session.used = now
        above = set(map(id, end.ancestors()))
        turns_ends = session.ends[:-1] if session.unanswered else session.ends
        session.alternates = session.alternates or any(id(e) in above for e in turns_ends[:-1])
        session.unanswered = not answered
        kept = [e for e in session.ends if e is not end and _held(e) is not None and id(e) not in above]
        session.ends = [*kept, end][-self._keep - session.unanswered :] if self._keep else []
        self._known.put(key, session)

    def _caller(self, session: Session | None) -> Session | None:
        return self._known.get(session.caller) if session is not None and session.caller is not None else None

    def _likely_caller(self, owner: str | None, end: Segment, now: float) -> Key | None:
        """Of a new conversation: the owner's conversation that was active last and begins with the same segment; if any
        of these waits for a call, the last of those. If that one was begun by another that has not come back since, the
        same one has begun this, too, unless only the later one waits for a call. Where nobody knows which answers call
        tools, nobody is found: a sub-agent that has ended resembles a new one more than their caller does."""
        first = _first(end)
        alike = [
            (session.calls, session.used, key)
            for key, session in self._known.items()
            if key[0] == owner
            and session.calls is not None
            and now - session.used <= self._lately
            and any(_first(known) is first for known in session.ends[-1:])
        ]
        if not alike:
            return None
        *_, latest = max(alike)
        session = self._known.get(latest)
        caller = self._caller(session)
        if session is None or caller is None or caller.used >= session.created:
            return latest
        return session.caller if caller.calls or not session.calls else latest

    def protection(self, now: float) -> dict[int, Strength]:
        """For the deepest segment of each protected end that holds KV (by `id`): how strongly, greater is stronger.

        The reasons stand in docs/kvcache.md. A conversation that was seen to go back to an earlier end may be several
        that share a name: then each end counts by its own silence.
        """
        strengths: dict[int, Strength] = {}
        silences = {
            final: sorted(now - session.used for _, session in self._known.items() if (session.calls is False) is final)
            for final in (False, True)
        }

        def rate_of(session: Session, used: float) -> float:
            kind = session.calls is False
            return rate_of_return(now - used, session.pauses[kind], self._pauses[kind], silences[kind])

        live = self._live(now)
        last = max((session.used for session in live), default=now)
        for session in live:
            caller = self._caller_of_ended(session, now) if session.used < last else None
            for end in session.ends:
                if (held := _held(end)) is None:
                    continue
                newest = end is session.ends[-1]
                if newest or session.alternates:
                    used = session.used if newest else end.used
                    returns = rate_of(session, used)
                    if caller is not None:
                        returns, used = min(returns, rate_of(caller, caller.used)), used - self._waits_for
                    strength = Strength(Claim.IN_PROGRESS, returns, used)
                else:
                    strength = Strength(Claim.LEFT, used=end.used)
                strengths[id(held)] = max(strengths.get(id(held), strength), strength)
        return strengths

    def _caller_of_ended(self, session: Session, now: float) -> Session | None:
        """If this is a sub-agent that has given its final answer: the larger conversation that has begun it and has not
        come back since. It need not wait for a call: some clients begin sub-agents by themselves."""
        caller = self._caller(session)
        if caller is None or not caller.ends or not session.ends:
            return None
        ended = session.calls is False and session.pauses[True].longest <= _PERSON
        waits = caller.used < session.created and now - caller.used <= self._waits_for
        return caller if ended and waits and session.ends[-1].end < caller.ends[-1].end else None

    def protected_bytes(self, now: float) -> int:
        """KV that the protected ends stand on, themselves included."""
        ends = [end for session in self._live(now) for end in session.ends]
        held = {segment for end in ends for segment in (end, *end.ancestors())}
        return sum(segment.nbytes for segment in held)

    def _live(self, now: float) -> list[Session]:
        return [s for _, s in self._known.items() if not self._idle or now - s.used <= self._idle]

    def ends(self) -> list[tuple[str, list[Segment]]]:
        """Names of the conversations, the last used one first, with their ends. Two owners may have the same name. May
        be called from any thread."""
        known = sorted(self._known.items(), key=lambda item: -item[1].used)
        return [(name, list(session.ends)) for (_, name), session in known]

    def clear(self) -> None:
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


def _held(end: Segment) -> Segment | None:
    """The deepest segment of the path to `end` that holds KV: the end itself until it is evicted."""
    return next((segment for segment in (end, *end.ancestors()) if segment.rows is not None), None)


def _first(end: Segment) -> Segment:
    """The first segment of the path to `end`."""
    return next(reversed([end, *end.ancestors()]))
