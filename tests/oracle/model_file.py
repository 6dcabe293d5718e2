"""A model whose KV *is* the token history. Copied into the checkpoint as its `model_file`; stands alone.

Keys hold token ids (+1, so that 0 means "never written"), values hold RoPE positions, and the `ArraysCache` of the
hybrid kind holds a position-weighted checksum of every token it saw. What the model answers follows from what it sees
through the cache, so a cache that was cut, merged or restored wrongly cannot give the right answer. `answers.py` has
the cues.

Environment, read at every pass: `ORACLE_LOG` (a JSON line per pass is appended), `ORACLE_SLEEP_PER_TOKEN` and
`ORACLE_SLEEP_PER_STEP` (seconds per prefilled token, per decode pass), `ORACLE_PASS` (four numbers: the seconds that a
pass takes in all, plus those for each token in it, each token in the KV, and each pair of both), `ORACLE_CLOCK`
(`virtual`: `time.sleep` is somebody's own, and is told first what a pass computed, as less than nothing),
`ORACLE_REPLIES` (a file whose text, if any, is the next answer, whatever the cues say), `ORACLE_FAULT` (a file whose
text says what goes wrong in the next pass: `hang`, `exit` or `raise`), `ORACLE_HOLD_LOADING` (loading goes on once
this file is gone; another with `.reached` behind its name says that it has come so far).
"""

# No postponed annotations here: mlx-lm does not register this module, and dataclasses would look for it.

import importlib.util
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

_spec = importlib.util.spec_from_file_location("oracle_answers", Path(__file__).parent / "oracle_answers.py")
assert _spec is not None and _spec.loader is not None
answers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(answers)

PRIME = 2**31 - 1
CHOSEN, OTHER = 80.0, 0.0


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    layer_kinds: list[str]
    vocab_size: int
    window: int


@dataclass
class Pass:
    """One forward pass; an entry per row that had a token in it.

    Attributes:
        tokens: real (not padding) tokens of each row.
        offsets: tokens that the row's KV held before.
        decode: the row only fed back the token that it had just answered.
    """

    tokens: list[int]
    offsets: list[int]
    decode: list[bool]


@dataclass
class Work:
    """What went through the model in this process. `computed` counts prompt tokens, `decoded` answer tokens."""

    passes: list[Pass] = field(default_factory=list)

    @property
    def computed(self) -> int:
        return sum(n for p in self.passes for n, decode in zip(p.tokens, p.decode, strict=True) if not decode)

    @property
    def decoded(self) -> int:
        return sum(n for p in self.passes for n, decode in zip(p.tokens, p.decode, strict=True) if decode)

    def reset(self) -> None:
        self.passes.clear()


def checksum(tokens: np.ndarray, start: int) -> int:
    """Sum over tokens of (id + 1) times a weight of its position, modulo a prime: order and position matter."""
    position = np.arange(start, start + len(tokens), dtype=np.int64)
    weight = ((position + 1) * 2654435761 ^ (position >> 5) * 40503) % PRIME
    return int((((tokens.astype(np.int64) + 1) * weight) % PRIME).sum() % PRIME)


class Summed:
    """The checksum of a whole history. What the one before it had in common with it is not added up again."""

    def __init__(self) -> None:
        self._tokens, self._total = np.zeros(0, np.int32), 0

    def of(self, tokens: np.ndarray) -> int:
        held = len(self._tokens)
        if held > len(tokens) or not np.array_equal(self._tokens, tokens[:held]):
            held, self._total = 0, 0
        self._total = (self._total + checksum(tokens[held:], held)) % PRIME
        self._tokens = tokens.copy()
        return self._total


def go_wrong(file: Path) -> None:
    """Does what the file asks for, until it is gone."""
    try:
        fault = file.read_text()
    except FileNotFoundError:  # it may go between a look and a reading
        return
    while fault == "hang" and file.exists():
        time.sleep(0.05)
    if fault == "exit":
        raise SystemExit("the model wants to exit")
    if fault == "raise":
        raise RuntimeError("the model fails")


def take_time(entry: Pass, width: int, began: float) -> None:
    """Sleeps until the pass has taken as long as `ORACLE_PASS` says; on a virtual clock first back to its beginning."""
    if costs := os.environ.get("ORACLE_PASS"):
        first, token, held, pair = map(float, costs.split())
        context = max(entry.offsets, default=0)
        seconds = first + token * width + held * context + pair * context * width
        computed = time.perf_counter() - began
        if os.environ.get("ORACLE_CLOCK") == "virtual":
            time.sleep(-computed)
            time.sleep(seconds)
        elif computed < seconds:
            time.sleep(seconds - computed)


@dataclass
class Fetched:
    """A layer's keys, values and mask, not yet computed."""

    keys: mx.array
    values: mx.array
    mask: Any


def _column(numbers: np.ndarray) -> mx.array:
    """(batch, length) as keys or values: (batch, 1, length, 1)."""
    return mx.array(numbers.astype(np.float32)[:, None, :, None])


class Attention(nn.Module):
    """What the last query sees, in two steps, so that the arrays of all layers are computed at once."""

    def __call__(self, tokens: np.ndarray, cache: Any) -> Fetched:
        length, offset = tokens.shape[1], cache.offset
        first = np.array(offset)[:, None] if isinstance(offset, mx.array) else offset
        positions = np.broadcast_to(first + np.arange(length), tokens.shape)
        mask = cache.make_mask(length) if hasattr(cache, "max_size") else None
        keys, values = cache.update_and_fetch(_column(tokens + 1), _column(positions))
        return Fetched(keys, values, mask)

    def seen(self, fetched: Fetched, cache: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each row, (token ids, positions)."""
        rotating, mask = hasattr(cache, "max_size"), fetched.mask
        ids = np.array(fetched.keys)[:, 0, :, 0].astype(np.int32) - 1
        at = np.array(fetched.values)[:, 0, :, 0].astype(np.int32)
        if isinstance(mask, mx.array):
            visible = np.broadcast_to(np.array(mask[..., -1, :]).reshape(-1, ids.shape[1]), ids.shape)
        elif not rotating and hasattr(cache, "left_padding"):
            visible = np.arange(ids.shape[1])[None] >= np.array(cache.left_padding)[:, None]
        elif not rotating:
            return list(zip(ids, at, strict=True))
        else:
            visible = np.ones(ids.shape, dtype=bool)
        rows = []
        for row in range(len(ids)):
            see, where = ids[row][visible[row]], at[row][visible[row]]
            if rotating:
                order = np.argsort(where, kind="stable")
                see, where = see[order], where[order]
            rows.append((see, where))
        return rows


class Recurrent(nn.Module):
    """A state that cannot be cut: how many tokens it saw, their checksum, and the last three."""

    def __call__(self, tokens: np.ndarray, cache: Any) -> list[tuple[int, int, tuple[int, ...]]]:
        batch, length = tokens.shape
        raw_mask = cache.make_mask(length)
        mask = (
            np.ones(tokens.shape, dtype=bool) if raw_mask is None else np.broadcast_to(np.array(raw_mask), tokens.shape)
        )
        empty = cache[0] is None
        state = np.zeros((batch, 2), np.int32) if empty else np.array(cache[0])
        last = np.zeros((batch, 3), np.int32) if empty else np.array(cache[1])
        for row in range(batch):
            fresh = tokens[row][mask[row]]
            count, total = int(state[row, 0]), int(state[row, 1])
            state[row] = count + len(fresh), (total + checksum(fresh, count)) % PRIME
            last[row] = np.concatenate([last[row], fresh + 1])[-3:]
        cache[0], cache[1] = mx.array(state), mx.array(last)
        cache.advance(length)
        return [
            (int(count), int(total), tuple(recent)) for (count, total), recent in zip(state, last.tolist(), strict=True)
        ]


class Model(nn.Module):
    """Answers with the token that the cues in the visible history ask for; see the module's docstring.

    A pass over several tokens of an answer (a verified draft) has an answer at each of its positions; in any other
    pass only the last position has meaningful logits, and the others repeat it.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if hold := os.environ.get("ORACLE_HOLD_LOADING"):
            Path(f"{hold}.reached").touch()
            while Path(hold).exists():
                time.sleep(0.05)
        self.args = args
        self.model_type = args.model_type
        self.layers = [Recurrent() if kind == "A" else Attention() for kind in args.layer_kinds]
        self.weight = mx.zeros((8,))
        self.work = Work()
        self.summed = Summed()
        self.answers = answers.Answers(Path(__file__).parent / "tokenizer.json")
        self.base = self.answers.base_logits(args.vocab_size, OTHER)

    def make_cache(self) -> list[Any]:
        made = {"A": lambda: ArraysCache(2), "K": KVCache, "R": lambda: RotatingKVCache(max_size=self.args.window)}
        return [made[kind]() for kind in self.args.layer_kinds]

    def __call__(self, inputs: mx.array, cache: Any = None, **_: Any) -> mx.array:
        if fault := os.environ.get("ORACLE_FAULT"):
            go_wrong(Path(fault))
        cache, began = self.make_cache() if cache is None else cache, time.perf_counter()
        tokens = np.array(inputs).astype(np.int64)
        batch, length = tokens.shape
        passed = [layer(tokens, c) for layer, c in zip(self.layers, cache, strict=True)]
        mx.eval([[each.keys, each.values] for each in passed if isinstance(each, Fetched)])
        seen = [
            layer.seen(each, c) if isinstance(each, Fetched) else each
            for layer, each, c in zip(self.layers, passed, cache, strict=True)
        ]
        logits = np.repeat(self.base[None, None], batch, axis=0)
        entry = Pass([], [], [])
        for row in range(batch):
            real = int((tokens[row] != answers.PAD).sum())
            if not real:
                continue
            first = next(s for s, kind in zip(seen, self.args.layer_kinds, strict=True) if kind == "K")
            history = first[row][0]
            entry.tokens.append(real)
            entry.offsets.append(len(history) - length)
            decode = False
            if tokens[row, -1] != answers.PAD:
                problem = self._problem([layer[row] for layer in seen], history)
                decode, said = self.answers.steps(history.astype("<i4"), length, problem)
                if len(said) > logits.shape[1]:
                    logits = np.repeat(logits, len(said), axis=1)
                logits[row, np.arange(len(said)), said] = CHOSEN
            entry.decode.append(decode)
        self._record(entry)
        answer = mx.broadcast_to(mx.array(logits), (batch, length, logits.shape[2]))
        take_time(entry, length, began)  # the last: what is computed here is no part of the pass
        return answer

    def _problem(self, rows: list[Any], history: np.ndarray) -> str | None:
        """What is wrong with one row's caches, or ``None``. No numbers: it must stay the same while decoding."""
        count = len(history)
        for index, (kind, row) in enumerate(zip(self.args.layer_kinds, rows, strict=True)):
            if kind == "A":
                last = [0, 0, 0, *(history[-3:] + 1).tolist()][-3:]
                if row != (count, self.summed.of(history), tuple(last)):
                    return f"layer {index}: the state has not seen the tokens that the KV holds"
                continue
            see, where = row
            start = max(0, count - self.args.window) if kind == "R" else 0
            if (see < 0).any():
                return f"layer {index}: a hole in the KV"
            if len(where) != count - start or (where != np.arange(start, count)).any():
                return f"layer {index}: wrong positions"
            if (see != history[start:]).any():
                return f"layer {index}: other tokens than the first layer"
        return None

    def _record(self, entry: Pass) -> None:
        if "ORACLE_FORGETS" not in os.environ:  # for hours: a server's memory is looked at, not the oracle's
            self.work.passes.append(entry)
        if path := os.environ.get("ORACLE_LOG"):
            line = {"t": time.time(), "tokens": entry.tokens, "offsets": entry.offsets, "decode": entry.decode}
            with open(path, "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        prefilled = sum(n for n, decode in zip(entry.tokens, entry.decode, strict=True) if not decode)
        if pause := float(os.environ.get("ORACLE_SLEEP_PER_TOKEN", "0")) * prefilled:
            time.sleep(pause)
        if any(entry.decode) and (pause := float(os.environ.get("ORACLE_SLEEP_PER_STEP", "0"))):
            time.sleep(pause)
