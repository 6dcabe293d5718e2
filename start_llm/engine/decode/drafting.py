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
from functools import partial
from typing import Any

import numpy as np
from mlx_lm.models.cache import RotatingKVCache

from start_llm.core.work import Submit
from start_llm.engine.decode.costs import PassCosts
from start_llm.engine.decode.draft import Acceptance, RowDrafts, SuffixIndex
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.measure import measuring
from start_llm.engine.decode.rewind import Rewinder, leaves
from start_llm.engine.decode.row import Cache
from start_llm.files.lru import Lru
from start_llm.kvcache.blocks import as_tokens

log = logging.getLogger(__name__)

_ANSWERS = 16
_CONVERSATIONS = 64
KNOWN_COSTS = 64


@dataclass(frozen=True, slots=True)
class _Answer:
    """To a prompt; `said` grows while it is generated."""

    conversation: str
    prompt: np.ndarray
    said: list[int]


class Drafts:
    """For one model."""

    def __init__(self, gate: DraftGate) -> None:
        self.gate = gate
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafts")
        self._answers: deque[_Answer] = deque(maxlen=_ANSWERS)
        self._acceptances = Lru[str, Acceptance](_CONVERSATIONS)

    def begin(self, work: Submit, generated: Sequence[int]) -> RowDrafts:
        """Starts to build the index of a request's row, unless it wants no drafts.

        What this conversation was answered to the very same prompt before is part of it (a client that asks again
        often gets the same answer); nothing of any other conversation is. What a request took tells which words were
        proposed, so a client that shares no more than a session's name, or a question, must not find another one's.
        """
        if not work.sampling.drafts:
            return RowDrafts()
        prompt = as_tokens(work.prompt.tokens)
        same = [answer for answer in self._answers if answer.conversation == work.conversation]
        others = [list(answer.said) for answer in same if _begins_with(prompt, answer.prompt)]
        answer = _Answer(work.conversation or "", prompt, list(generated))
        if work.conversation is not None:
            self._answers.append(answer)
        index = self._builder.submit(_build, (*work.prompt.tokens, *generated), work.views, others)
        return RowDrafts(partial(_when_built, index), self._acceptance(work.conversation), answer.said)

    def close(self) -> None:
        self._builder.shutdown(wait=False, cancel_futures=True)

    def _acceptance(self, conversation: str | None) -> Acceptance:
        """A session that copies does not pay for one that does not."""
        if conversation is None:
            return Acceptance(self.gate.acceptance)
        found = self._acceptances.get(conversation)
        if found is None:
            self._acceptances.put(conversation, found := Acceptance(self.gate.acceptance))
        return found


def make_drafts(
    model: Any, make_cache: Callable[[], Cache], known: Lru[str, PassCosts], fingerprint: str
) -> Generator[float, None, Drafts | None]:
    """Measures the model, a pass a step; ``None``: its passes fail, or its cache cannot give tokens back.

    `known`: what was measured before, and what was learned since.
    """
    try:
        cache = make_cache()
        rewinder = Rewinder(cache)
        if not rewinder.possible:
            return None
        costs = known.get(fingerprint)
        if costs is None:
            windows = [leaf.max_size for leaf in leaves(cache) if isinstance(leaf, RotatingKVCache)]
            costs = PassCosts(max(windows, default=0))
            yield from measuring(model, make_cache, costs.observe)
            known.put(fingerprint, costs)
        return Drafts(DraftGate(costs, rewinder.carries))
    except Exception:  # a model's own code may do anything; it decodes without
        log.warning("no drafts: the passes of this model could not be measured", exc_info=True)
        return None


def _build(
    row: Sequence[int], views: Callable[[], Sequence[Any]] | None, said: Sequence[Sequence[int]]
) -> SuffixIndex | None:
    """``None``: it cannot be built."""
    try:
        return SuffixIndex(row, [*(views() if views is not None else ()), *said])
    except Exception as error:  # the thread's edge
        log.warning("no drafts for a request: %s", error, exc_info=True)
        return None


def _when_built(index: Future[SuffixIndex | None]) -> SuffixIndex | None:
    return index.result() if index.done() else None


def _begins_with(tokens: np.ndarray, start: np.ndarray) -> bool:
    return len(start) <= len(tokens) and bool((tokens[: len(start)] == start).all())
