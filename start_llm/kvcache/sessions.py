"""Which stored ends belong to which conversation, and how strongly they are protected."""

from __future__ import annotations

from dataclasses import dataclass, field

from start_llm.files.lru import Lru
from start_llm.kvcache.tree import Segment


@dataclass(slots=True)
class Session:
    """A conversation. `ends`: the segments where its last stored turns end, oldest first."""

    created: float
    used: float
    ends: list[Segment] = field(default_factory=list)


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
        self._known: Lru[str, Session] = Lru(most)

    def add_end(self, name: str, end: Segment, now: float) -> None:
        """A turn of `name` was stored up to `end`; ends that it grew out of are no ends any more."""
        session = self._known.get(name) or Session(now, now)
        session.used = now
        above = set(map(id, end.ancestors()))
        kept = [e for e in session.ends if e is not end and e.rows is not None and id(e) not in above]
        session.ends = [*kept, end][-self._keep :] if self._keep else []
        self._known.put(name, session)

    def protection(self, now: float, budget_bytes: int) -> dict[int, tuple[int, float]]:
        """For each protected end (by `id`): how strongly, greater is stronger.

        Up to half of the budget is reserved for the conversations that began first, so that a dozen
        sub-agents do not push out the one that called them. The eldest is reserved even where it takes
        more, as long as it was active lately (a sixth of the idle limit). The others share the rest
        by last use, so that no conversation that runs now starves beside finished ones.
        """
        strengths: dict[int, tuple[int, float]] = {}
        left, seen = budget_bytes // 2, set[int]()
        reserving = True
        for number, session in enumerate(sorted(self._live(now), key=lambda s: s.created)):
            ends = [end for end in session.ends if end.rows is not None]
            left -= sum(_path_bytes(end, seen) for end in ends)
            lately = not self._idle or now - session.used <= self._idle / 6
            reserving = reserving and (left >= 0 or (number == 0 and lately))
            strength = (2, -session.created) if reserving else (1, session.used)
            for end in ends:
                strengths[id(end)] = max(strengths.get(id(end), strength), strength)
        return strengths

    def protected_bytes(self, now: float) -> int:
        """KV that the protected ends stand on, themselves included."""
        seen = set[int]()
        return sum(_path_bytes(end, seen) for session in self._live(now) for end in session.ends)

    def _live(self, now: float) -> list[Session]:
        return [s for _, s in self._known.items() if not self._idle or now - s.used <= self._idle]

    def ends(self) -> list[tuple[str, list[Segment]]]:
        """The conversations, the last used one first, with their ends. May be called from any thread."""
        known = sorted(self._known.items(), key=lambda item: -item[1].used)
        return [(name, list(session.ends)) for name, session in known]

    def clear(self) -> None:
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


def _path_bytes(end: Segment, seen: set[int]) -> int:
    """KV on the path to `end` that is not in `seen` yet, and enters it there."""
    total = 0
    for segment in (end, *end.ancestors()):
        if id(segment) in seen:
            break  # and so are all above it
        seen.add(id(segment))
        total += segment.nbytes
    return total
