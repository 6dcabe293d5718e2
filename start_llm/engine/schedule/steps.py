"""How many prompt tokens go through the model at a time, and how often. Arithmetic only; model thread.

Large steps keep a GPU busy, small ones let a new request, a cancel or another row's next token come soon. So a step
takes a while where nobody else is there and a moment where somebody is. What a step may take of memory is bounded
by what the last ones were measured to take: attention over a long context needs far more of it for each token.
"""

from __future__ import annotations

DECODE_SHARE = 0.5
"""Of the model's time, that answers in progress get while other prompts are computed."""
ALONE_SECONDS = 2.0
EXPECTING_SECONDS = 0.8
"""Of a step where nobody else is there, and a small question may come."""
SHARED_SECONDS = 0.5
FIRST, LEAST, MOST = 512, 256, 4096
TIGHT = 64  # fewer tokens than this are never worth a step, however short memory is
_NEWEST = 0.5  # weight of the last step in the average
_EVEN = 16  # steps are multiples of it


class StepSize:
    """`fixed`: tokens of every step; ``None``: they follow from what the last steps took. `most_bytes`: memory that a
    step may take beyond what was allocated before it.
    """

    def __init__(self, fixed: int | None, most_bytes: int) -> None:
        self._fixed, self._most_bytes = fixed, most_bytes
        self._reach = FIRST  # no larger step is tried before one of half its size went well
        self._seconds = 0.0  # a token
        self._bytes = 0.0  # a token, at a context of so many tokens:
        self._context = 1

    def next(self, context: int, *, shared: bool, expecting: bool = False) -> int:
        """Tokens of the next step.

        Args:
            context: tokens that are in the row's KV before it.
            shared: somebody else waits for a token or for a turn.
            expecting: somebody may come who should not wait for long.
        """
        if self._fixed is not None:
            return self._fixed
        size = float(self._reach)
        if self._seconds:
            alone = EXPECTING_SECONDS if expecting else ALONE_SECONDS
            size = min(size, (SHARED_SECONDS if shared else alone) / self._seconds)
        elif shared:  # nobody knows how long a large one would take
            size = TIGHT
        size = max(size, TIGHT if shared else LEAST)
        if self._bytes:
            grown = max(1.0, (context + size) / self._context)
            size = min(size, self._most_bytes / (self._bytes * grown))
        return max(TIGHT, int(size) // _EVEN * _EVEN)

    def measure(self, tokens: int, context: int, seconds: float, nbytes: int) -> None:
        """What the last step took. The next one may be twice as large, at most (`_reach`), if it went well.

        Args:
            tokens: its size; it may have been cut short by a pause or by the prompt's end.
            context: tokens in the row's KV after it.
            nbytes: the most that was allocated while it ran, less what was allocated before.
        """
        if tokens >= self._reach and nbytes <= self._most_bytes:
            self._reach = min(2 * tokens, MOST)
        if tokens >= TIGHT:
            self._bytes, self._context = nbytes / tokens, max(1, context)
            cost = seconds / tokens
            self._seconds = cost if not self._seconds else (1 - _NEWEST) * self._seconds + _NEWEST * cost


class DecodeShare:
    """Shares the model's time between rows that decode and prompts that are computed.

    With both there, several decode passes stand between two chunks of a prompt: they take `share` of the time. A chunk
    reads all weights once, as a decode pass does. That part of it is not charged to the prompt, for its chunks are
    small only because of the rows.

    `share`: from 0 (one decode pass between two chunks) to under 1.
    """

    def __init__(self, share: float) -> None:
        self._ratio = share / (1 - share)
        self._owed = 0.0  # seconds that rows get before the next chunk
        self._pass = 0.0  # seconds of the last decode pass

    @property
    def may_prefill(self) -> bool:
        """Whether the rows have had their time; half a pass is no reason for another one."""
        return self._owed <= self._pass / 2

    def decoded(self, seconds: float) -> None:
        """A decode pass of all rows took so long."""
        self._pass = seconds
        self._owed = max(self._owed - seconds, -seconds / 2)

    def prefilled(self, seconds: float) -> None:
        """A chunk took so long while rows waited."""
        self._owed += self._ratio * max(0.0, seconds - self._pass)
