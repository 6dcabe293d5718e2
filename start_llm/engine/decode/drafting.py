"""What drafts need beside the rows: the gate, indexes that are built meanwhile, and what was said lately.

Indexes are built by a thread of their own, while the prompt is prefilled or the first tokens are decoded; all else here
is called on the model thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from start_llm.core.work import Submit
from start_llm.engine.decode.costs import Acceptance, CostTable, DraftGate
from start_llm.engine.decode.draft import Drafter, SuffixIndex
from start_llm.engine.decode.measure import measuring
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.decode.runner import Cache
from start_llm.files.lru import Lru
from start_llm.kvcache.blocks import as_tokens

log = logging.getLogger(__name__)

_GENERATIONS = 16
KNOWN_COSTS = 64


@dataclass(frozen=True, slots=True)
class _Generation:
    """An answer to a prompt; `said` grows while it is generated."""

    conversation: str
    prompt: np.ndarray
    said: list[int]


class RowDrafter:
    """Gives a row its drafter once that is ready. `said` is to be told each token."""

    def __init__(self, future: Future[SuffixIndex], said: list[int]) -> None:
        self._future, self.said = future, said
        self._failed = False

    def __call__(self) -> Drafter | None:
        if self._failed or not self._future.done():
            return None
        error = self._future.exception()
        if error is None:
            return self._future.result()
        self._failed = True
        log.warning("no drafts for a request: %s", error, exc_info=error)
        return None


class Drafts:
    """For one model."""

    def __init__(self, gate: DraftGate) -> None:
        self.gate = gate
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafts")
        self._recent: deque[_Generation] = deque(maxlen=_GENERATIONS)

    def begin(self, work: Submit, generated: Sequence[int]) -> RowDrafter | None:
        """Starts to build the index of a request's row; ``None`` if it wants no drafts.

        What this conversation was answered to the very same prompt before is part of it (a client that asks again
        often gets the same answer); nothing of any other conversation is. What a request took tells which words were
        proposed, so a client that shares no more than a session's name, or a question, must not find another one's.
        """
        if not work.sampling.drafts:
            return None
        prompt = as_tokens(work.prompt.tokens)
        own = [g for g in self._recent if g.conversation == work.conversation]
        said = [list(g.said) for g in own if _begins_with(prompt, g.prompt)]
        generation = _Generation(work.conversation or "", prompt, list(generated))
        if work.conversation is not None:
            self._recent.append(generation)
        row = (*work.prompt.tokens, *generated)
        return RowDrafter(self._builder.submit(_build, row, work.views, said), generation.said)

    def close(self) -> None:
        self._builder.shutdown(wait=False, cancel_futures=True)


def make_drafts(
    model: Any, make_cache: Callable[[], Cache], known: Lru[str, CostTable], fingerprint: str
) -> Generator[float, None, Drafts | None]:
    """Measures the model, a pass a step; ``None`` if it has a cache that cannot give tokens back.

    Args:
        known: what was measured before, and what was learned since.
    """
    rewinder = Rewinder(make_cache())
    if not rewinder.possible:
        return None
    costs = known.get(fingerprint)
    if costs is None:
        costs = CostTable((yield from measuring(model, make_cache)))
        known.put(fingerprint, costs)
    return Drafts(DraftGate(costs, Acceptance(), rewinder.carries))


def _build(row: Sequence[int], views: Callable[[], Sequence[Any]] | None, said: Sequence[Sequence[int]]) -> SuffixIndex:
    return SuffixIndex(row, [*(views() if views is not None else ()), *said])


def _begins_with(tokens: np.ndarray, start: np.ndarray) -> bool:
    return len(start) <= len(tokens) and bool((tokens[: len(start)] == start).all())
