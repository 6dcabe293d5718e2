"""What a model that serves nobody yet is asked: one greedy answer, and how it decodes. Model thread only.

Checked is whether it decodes rows of different lengths together, and goes on from stored KV, as it does alone: the same
tokens are fed in each way, and what the model predicts is compared. Knows neither scheduler nor store.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from start_llm.engine.decode.batch import BatchRunner, eval_cache
from start_llm.engine.decode.row import Cache, RowState
from start_llm.kvcache.kinds import kind_of, leaves
from start_llm.kvcache.layers import LayerKit
from start_llm.models.capabilities import DecodingCheck

log = logging.getLogger(__name__)

STEPS = 4
LENGTHS = (7, 31)  # tokens of the two rows: prompts of very different lengths, so that the shorter one is padded
MOST_LENGTH = 8192
LEAST_DIFFERENCE, MOST_DIFFERENCE = 0.02, 0.2
"""Half the sum of the differences of all probabilities, 0 to 1: what is allowed at least, and at most."""
_NOISE = 4.0  # times what rounding changes in a batch of equal rows, about 0.01 in half precision

_CHUNK, _MOST_CHUNK = 32, 256  # tokens in one pass: of a question, for which other models wait; of other texts


class TooSlow(Exception):
    """It would take too long here."""


def greedy(
    model: Any,
    tokens: Sequence[int],
    *,
    eos: Collection[int],
    most: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int | None]:
    """The tokens that `model` answers to `tokens`, without the end token; ``None`` after each chunk of the prompt.

    `model`: mlx-lm's, or of that shape. It ends after `most` tokens.

    Raises TooSlow: it takes longer than `seconds`, or the prompt would; the tokens up to then have been given.
    """
    began = clock()
    cache = make_prompt_cache(model)
    waiting = list(tokens)
    while len(waiting) > 1:
        chunk = waiting[: min(_CHUNK, len(waiting) - 1)]
        model(mx.array(chunk)[None], cache=cache)
        eval_cache(cache)
        del waiting[: len(chunk)]
        if (clock() - began) * len(tokens) > seconds * (len(tokens) - len(waiting)):
            raise TooSlow
        yield None
    for _ in range(most):
        logits = model(mx.array(waiting)[None], cache=cache)
        token = cast(int, mx.argmax(logits[0, -1]).item())
        if token in eos:
            return
        yield token
        if clock() - began > seconds:
            raise TooSlow
        waiting = [token]


@dataclass(frozen=True, slots=True)
class _Row:
    """A text of `length` tokens that goes on with `STEPS` more."""

    tokens: list[int]
    length: int
    cache: Cache  # holds all of the text but its last token; a deep copy copies no bytes before they are written to
    expected: list[mx.array]  # what the model predicts, each [vocab]


def check_decoding(
    model: Any, make_cache: Callable[[], Cache], tokens: Sequence[int]
) -> Generator[float, None, DecodingCheck | None]:
    """Whether a model computes batches, and goes on from stored KV, as a row alone; pauses after each pass. ``None``:
    not even a row alone is computed. `tokens`: of some text, which is repeated as often as it has to be."""
    try:
        return (yield from _check(model, make_cache, tokens))
    except Exception:  # a model's own code may do anything; its requests say so, too
        log.warning("how a model decodes could not be checked", exc_info=True)
        return None
    finally:
        mx.clear_cache()


def _check(model: Any, make_cache: Callable[[], Cache], tokens: Sequence[int]) -> Generator[float, None, DecodingCheck]:
    """`check_decoding` itself. What the model raises while single rows are made is raised; later it is a reason."""
    groups = map(_group_tokens, leaves(make_cache()))
    longest = min(MOST_LENGTH, LENGTHS[1] + max((_dense_tokens(model), *groups)))
    text = list(islice(cycle(tokens), longest + STEPS))
    rows = []
    for length in dict.fromkeys((LENGTHS[0], longest - LENGTHS[0], longest)):
        cache = make_cache()
        for start in range(0, length - 1, _MOST_CHUNK):
            model(mx.array(text[start : min(start + _MOST_CHUNK, length - 1)])[None], cache=cache)
            eval_cache(cache)
            yield 0.0
        expected = yield from _predictions(model, copy.deepcopy(cache), text[length - 1 :])
        rows.append(_Row(text, length, cache, expected))

    def batches() -> Generator[float, None, tuple[float, float]]:
        noise = yield from _difference_in_batch(model, [rows[0], rows[0]])
        return (yield from _difference_in_batch(model, rows)), noise

    def reuse() -> Generator[float, None, tuple[float, float]]:
        row, kit = rows[-1], LayerKit(make_cache)
        held, middle = row.length - 1, row.length // 2 | 1  # not where a group of tokens ends
        runs = [kit.slice(row.cache, 0, middle), kit.slice(row.cache, middle, held)]
        restored, _ = kit.build(runs, kit.checkpoint(row.cache), held)
        found = yield from _predictions(model, restored, row.tokens[held:])
        return max(map(_difference, found, row.expected)), 0.0

    return DecodingCheck((yield from _reason(batches())), (yield from _reason(reuse())))


def _dense_tokens(model: Any) -> int:
    """How long a text has to be for a model with sparse attention to leave something out; 0: it has none."""
    dense = [0]
    for module in model.modules() if hasattr(model, "modules") else ():
        blocks, size = getattr(module, "index_topk_blocks", None), getattr(module, "index_block_size", None)
        dense.append(blocks * size if isinstance(blocks, int) and isinstance(size, int) else 0)
        topk = getattr(module, "index_topk", None)
        dense.append(topk if isinstance(topk, int) else 0)
    return max(dense)


def _group_tokens(layer: Any) -> int:
    """How long a text has to be for a pool to have rows; 0: the layer has none."""
    kind = kind_of(layer)
    rate = kind.rate(layer) if kind.columns else 0
    return 2 * rate if rate > 1 else 0


def _reason(steps: Generator[float, None, tuple[float, float]]) -> Generator[float, None, str]:
    """Why a way of decoding cannot be used; an empty text: it can. `steps` return the difference and the noise."""
    try:
        difference, noise = yield from steps
    except Exception as error:  # a model's own code may do anything; it is then served without
        log.info("a check of how a model decodes failed", exc_info=True)
        return f"{type(error).__name__}: {str(error)[:200]}"
    allowed = min(MOST_DIFFERENCE, max(LEAST_DIFFERENCE, _NOISE * noise))
    return "" if difference <= allowed else f"its predictions differ by {difference:.0%}"


def _predictions(model: Any, cache: Cache, tokens: Sequence[int]) -> Generator[float, None, list[mx.array]]:
    """Probabilities behind each of the first `STEPS` tokens, each [vocab]."""
    found = []
    for token in tokens[:STEPS]:
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
        found.append(mx.softmax(logits.astype(mx.float32)))
        mx.eval(found[-1])
        yield 0.0
    return found


def _difference(left: mx.array, right: mx.array) -> float:
    """Half the sum of the differences of two probabilities [vocab]; 1 if there is anything that is no number."""
    half = cast(float, mx.abs(left - right).sum().item()) / 2
    return half if half <= 1 else 1.0


def _difference_in_batch(model: Any, rows: list[_Row]) -> Generator[float, None, float]:
    """The largest difference (see `_difference`) of what the rows predict when they are decoded together."""
    runner = BatchRunner(model, eos=(), max_rows=len(rows))
    try:
        decoding = {}
        for row in rows:
            scripted = partial(_next_of, iter(row.tokens[row.length :]))
            *held, newest = row.tokens[: row.length]
            uid = runner.insert(RowState(copy.deepcopy(row.cache), held, newest, STEPS, scripted))
            decoding[uid] = iter(row.expected)
        left, worst = STEPS * len(rows), 0.0
        while left:
            for decoded in runner.decode():
                found = mx.softmax(decoded.logprobs.astype(mx.float32))
                worst = max(worst, _difference(found, next(decoding[decoded.uid])))
                left -= 1
            yield 0.0
        return worst
    finally:
        runner.close()


def _next_of(script: Iterator[int], _: Any) -> mx.array:
    """A sampler that draws what is written."""
    return mx.array([next(script, 0)])
