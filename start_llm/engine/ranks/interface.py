"""What a process asks of the ranks that compute its model, and the answers where it computes alone.

Knows no MLX. `RankGroup` (`group`) answers for several ranks, so nobody else asks how many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Ranks:
    """One rank: all that it asks for is as it says, and nothing is waited for.

    Attributes:
        rank, size: which one this is, of how many.
        alone: there is no other one.
    """

    rank, size = 0, 1
    alone = True

    # --- rank 0; not the model thread -----------------------------------------------

    def start(self, about: dict[str, Any]) -> None:
        """Starts the other ranks, which get `about`, and waits for them. Raises Unavailable."""

    def leave(self) -> None:
        """From now on nobody is told that a rank is lost."""

    def stop(self) -> None:
        """The other ranks end. May be called twice, and where nothing was started."""

    # --- model thread -----------------------------------------------------------------

    def connect(self, usable: int) -> int:
        """Waits for all ranks. Returns the bytes that a model may take: those of the machine that has least."""
        return usable

    def loaded(self) -> None:
        """The model is loaded: from now on silence counts."""

    def agree(self, value: Any) -> Any:
        """What rank 0 gave here (numbers, text, lists). To be called by all ranks in the same order."""
        return value

    def passing(self) -> AbstractContextManager[None]:
        """What goes wrong inside ends all ranks: the others may be in a pass that this one has left."""
        return nullcontext()

    def clock(self) -> float:
        """Seconds, never going back, as all ranks see them."""
        return time.monotonic()

    def shard(self, model: Any, name: str, config: Mapping[str, Any]) -> None:
        """Leaves of a model, none of whose weights are read yet, the part of this rank. Raises NotSupported."""

    def sampler(self, sampler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Draws what rank 0 draws. The same object for the same sampler, so that rows are drawn in one call."""
        return sampler

    def scheduler(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Makes schedulers of this kind. Those of rank 0 tell the other ranks what they do."""
        return kind
