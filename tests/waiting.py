"""How tests wait: for a state, for as long as a busy machine may need."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 180.0  # the start of a server computes for 7 s, which takes long beside busy neighbours


def until[T](condition: Callable[[], T], what: str = "it did not happen in time") -> T:
    """What `condition` returns, once that is true. It is asked less and less often, since asking costs, too."""
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, 0.002
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(pause)
        pause = min(0.1, 1.2 * pause)
    return found
