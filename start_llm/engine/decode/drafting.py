"""What drafts need beside the rows: what passes cost, measured at load, indexes, and what was said lately.

Indexes are built by a thread of their own, while the prompt is prefilled or the first tokens are decoded; all else here
is called on the model thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from start_llm.core.work import Submit
from start_llm.engine.decode.costs import WIDTHS, PassCosts
from start_llm.engine.decode.draft import Acceptance, RowDrafts, SuffixIndex
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.decode.row import Cache
from start_llm.engine.ranks.interface import Ranks
from start_llm.files.lru import Lru
from start_llm.kvcache.blocks import as_tokens, common_prefix
from start_llm.kvcache.kinds import held_tokens, leaves

log = logging.getLogger(__name__)

_ANSWERS = 16
_CONVERSATIONS = 64
KNOWN_COSTS = 64
SHORT, LONG = 64, 4096
_WARMING = 16  # tokens a pass before anything is measured
_MOST_BYTES = 512 << 20  # of made-up KV
_FAR_APART = (1, 8, 32)  # what is measured first: they say most about the rest
_ORDER = (*_FAR_APART, 4, 2, 16, 3, 6, 12, 5, 24)
_ROUNDS = 3
_HEADED = (1, 2, 4)  # tokens that a head proposes

Observe = Callable[[int, int, float], object]  # is told width, context and seconds of a pass


@dataclass(slots=True)
class _Passes:
    model: Any
    clock: Callable[[], float]
    seconds: float = 0.0  # that passes have taken, without what others did between them

    def run(self, cache: Cache, width: int) -> float:
        """Seconds that it took."""
        began = self.clock()
        logits = self.model(mx.zeros((1, width), dtype=mx.int32), cache=cache)
        mx.eval(mx.argmax(logits[:, -1, :], axis=-1), [leaf.state for leaf in cache])
        took = self.clock() - began
        self.seconds += took
        return took


def measuring(
    model: Any,
    make_cache: Callable[[], Cache],
    observe: Observe,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[float]:
    """Tells `observe` the quickest of a few passes for each width, at a short and a longer context.

    Pauses after each pass. A slow model is measured at few widths; the rest is learnt from what it serves. What the
    passes that warm up take is told, too.

    `seconds`: about how long it may take after the passes that warm up.
    """
    assert set(_ORDER) == set(WIDTHS)
    passes = _Passes(model, clock)
    passes.run(make_cache(), 1)  # reads weights that were not read yet
    yield 0.0
    cache = make_cache()
    for _ in range(SHORT // _WARMING):
        held = held_tokens(cache)
        took = passes.run(cache, _WARMING)
        if held:  # the very first one prepares what all others use
            observe(_WARMING, held, took)
        yield 0.0
    began, measured = passes.seconds, set[int]()
    for wanted, until in ((SHORT, began + seconds / 2), (LONG, began + seconds)):
        length = yield from _stretch(cache, wanted)
        if length in measured or (measured and passes.seconds >= until):
            break  # no layer's cost depends on the context, or there is no memory or no time for a longer one
        measured.add(length)
        found = yield from _widths(passes, cache, until, until + seconds / 2)
        for width, took in found.items():
            observe(width, length, took)
    mx.clear_cache()


def measuring_head(
    model: HeadedModel, observe: Observe, clock: Callable[[], float] = time.perf_counter
) -> Generator[float]:
    """Tells `observe` what the head takes to propose one token and several, the quickest of a few times each."""
    cache = model.make_cache()
    mx.eval(model(mx.zeros((1, SHORT), dtype=mx.int32), cache=cache))
    found: dict[int, float] = {}
    for count in (1, *_HEADED * _ROUNDS):  # the very first one prepares what all others use
        began = clock()
        model.propose(cache, [0], None, count, lambda logprobs: mx.argmax(logprobs, axis=-1))
        took = clock() - began
        found[count] = min(took, found.get(count, took))
        yield 0.0
    for count, took in found.items():
        for _ in range(_ROUNDS):
            observe(count, SHORT, took)


def _widths(passes: _Passes, cache: Cache, until: float, latest: float) -> Generator[float, None, dict[int, float]]:
    """Every width once, then again, until passes have taken `until` seconds; those that say most may take `latest`."""
    offsets = [(leaf, leaf.offset) for leaf in leaves(cache) if isinstance(leaf, KVCache)]
    found: dict[int, float] = {}
    for width in _ORDER * _ROUNDS:
        first = width in _FAR_APART and width not in found
        if found and passes.seconds + _guess(found, width) > (latest if first else until):
            break
        took = passes.run(cache, width)
        for leaf, offset in offsets:
            leaf.offset = offset
        found[width] = min(took, found.get(width, took))
        yield 0.0
    return found


def _guess(found: dict[int, float], width: int) -> float:
    """Seconds that a pass may take: a wider one is cheaper by the token."""
    nearest = min(found, key=lambda known: abs(known - width))
    return found[nearest] * max(1.0, width / nearest / 2)


def _stretch(cache: Cache, length: int) -> Generator[float, None, int]:
    """Makes the KV look as if it held so many tokens, or fewer if that takes too much memory. Returns how many."""
    plain = [leaf for leaf in leaves(cache) if isinstance(leaf, KVCache) and leaf.keys is not None]
    each = sum(a.nbytes // a.shape[2] for leaf in plain for a in (leaf.keys, leaf.values))
    length = min(length, _MOST_BYTES // each) if each else SHORT
    if length <= SHORT:
        return SHORT
    for leaf in plain:
        room = (*leaf.keys.shape[:2], length + WIDTHS[-1])
        leaf.keys = mx.zeros((*room, leaf.keys.shape[3]), dtype=leaf.keys.dtype)
        leaf.values = mx.zeros((*room, leaf.values.shape[3]), dtype=leaf.values.dtype)
        leaf.offset = length
        mx.eval(leaf.state)
        yield 0.0
    return length


@dataclass(frozen=True, slots=True)
class _Answer:
    """To a prompt; `said` grows while it is generated."""

    conversation: str
    prompt: np.ndarray
    said: list[int]


class Drafts:
    """For one model.

    `agree`: whether an index is ready; where several processes compute one model, the same for all of them.
    """

    def __init__(self, gate: DraftGate, agree: Callable[[bool], bool] = bool) -> None:
        self.gate, self._agree = gate, agree
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
        others = [list(a.said) for a in same if common_prefix(prompt, a.prompt) == len(a.prompt)]
        answer = _Answer(work.conversation or "", prompt, list(generated))
        acceptance = Acceptance(self.gate.acceptance)
        if work.conversation is not None:  # a session that copies does not pay for one that does not
            self._answers.append(answer)
            acceptance = self._acceptances.get(work.conversation) or acceptance
            self._acceptances.put(work.conversation, acceptance)
        index = self._builder.submit(_build, (*work.prompt.tokens, *generated), work.views, others)
        return RowDrafts(lambda: index.result() if self._agree(index.done()) else None, acceptance, answer.said)

    def close(self) -> None:
        self._builder.shutdown(wait=False, cancel_futures=True)


def make_drafts(
    model: Any,
    make_cache: Callable[[], Cache],
    known: Lru[str, PassCosts],
    fingerprint: str,
    ranks: Ranks,
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
            with ranks.passing():
                yield from measuring(model, make_cache, costs.observe, clock=ranks.clock)
            known.put(fingerprint, costs)
        head = None
        if isinstance(model, HeadedModel):
            head = known.get(f"{fingerprint} head")
            if head is None:
                head = PassCosts()
                yield from measuring_head(model, head.observe, ranks.clock)
                known.put(f"{fingerprint} head", head)
        return Drafts(DraftGate(costs, rewinder.carries, head, ranks.clock), ranks.agree)
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
