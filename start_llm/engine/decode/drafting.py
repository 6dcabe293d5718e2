"""What drafts need beside the rows: an index of each.

Indexes are built by a thread of their own, while the prompt is prefilled or the first tokens are decoded; all else here
is called on the model thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from start_llm.core.work import Submit
from start_llm.engine.decode.draft import RowDrafts, SuffixIndex
from start_llm.engine.decode.gate import DraftGate, PassCosts
from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.decode.row import Cache
from start_llm.engine.ranks.interface import Ranks

log = logging.getLogger(__name__)


class Drafts:
    """For one model.

    `agree`: whether an index is ready; where several processes compute one model, the same for all of them.
    """

    def __init__(self, gate: DraftGate, agree: Callable[[bool], bool] = bool) -> None:
        self.gate, self._agree = gate, agree
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafts")

    def begin(self, work: Submit, generated: Sequence[int]) -> RowDrafts:
        """Starts to build the index of a request's row, on the builder's thread, unless it wants no drafts. Nothing of
        any other request is part of it: what a request took tells which words were proposed."""
        if not work.sampling.drafts:
            return RowDrafts()
        index = self._builder.submit(_build, (*work.prompt.tokens, *generated), work.views)
        return RowDrafts(lambda: index.result() if self._agree(index.done()) else None)

    def close(self) -> None:
        self._builder.shutdown(wait=False, cancel_futures=True)


def make_drafts(model: Any, make_cache: Callable[[], Cache], ranks: Ranks) -> Drafts | None:
    """Once, when a model is loaded. ``None``: its cache cannot be made, or cannot give tokens back."""
    try:
        rewinder = Rewinder(make_cache())
    except Exception:  # a model's own code may do anything; it decodes without
        log.warning("no drafts: the cache of this model could not be made", exc_info=True)
        return None
    if not rewinder.possible:
        return None
    head = 0.0 if isinstance(model, HeadedModel) else None
    return Drafts(DraftGate(PassCosts(), rewinder.carries, head, ranks.clock), ranks.agree)


def _build(row: Sequence[int], views: Callable[[], Sequence[Any]] | None) -> SuffixIndex | None:
    """Of a row's tokens and other views of its conversation. The builder's thread. ``None``: it cannot be built."""
    try:
        return SuffixIndex(row, views() if views is not None else ())
    except Exception as error:  # the thread's edge
        log.warning("no drafts for a request: %s", error, exc_info=True)
        return None
