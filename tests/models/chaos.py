"""A tiny model with sparse attention, as it is served, while everything happens to it that may happen.

Requests go on from earlier ones, fork from them at any token (inside of a group of a pool, too), run side by side, are
cancelled and paused; drafts are wrong; stored KV is evicted; calls fail; the server ends and begins again with what
lies on disk. Whoever is answered is answered with the tokens of upstream's own loop over the same prompt.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from start_llm.core.events import Failed
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.checks import check_decoding
from start_llm.engine.decode import layerwise
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.draft import Proposal
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.row import DecodeRow
from start_llm.engine.decode.verify import SingleRow
from start_llm.engine.schedule import preemption
from start_llm.kvcache import layers
from start_llm.kvcache.kinds import kind_of, leaves
from start_llm.kvcache.layers import LayerKit, eval_and_free
from start_llm.models.background import at_once
from start_llm.models.capabilities import DecodingCheck
from tests.engine.fakes import Collected, engine_step
from tests.models.architectures import VOCAB
from tests.models.decode_everywhere import LONG, STORED, Engine, model_of, truth

TYPES = ("deepseek_v4", "qwen4_exp", "glm5_next")
TOGETHER = "hy_v4"
"""Its rows are decoded in one batch; those of the others one by one."""
METHODS = ("slice", "checkpoint", "part", "parts", "build", "adopt", "take_buffers", "make_room", "buffers", "unpack")
"""Of `LayerKit`; each can fail, as each pass and each copy of KV can."""
MOST_PROMPT = 240
ANSWERS = (1, 4, 9, 14), (9, 14, 25)
"""Tokens, where rows are decoded one by one, and together."""
ROWS = 3
FIGURES = {
    "kv_evicted": "evicted segments",
    "requests_paused": "pauses",
    "kv_disk_read_files": "files read",
    "kv_disk_damaged": "damaged files found",
    "kv_errors": "errors of the store",
}


class Fault(Exception):
    """Of a program."""


@functools.cache
def served(name: str) -> tuple[Any, DecodingCheck]:
    """The model, and whether it decodes rows together. Stored KV is used whatever the check at load says of it."""
    model = model_of(name)
    check = at_once(check_decoding(model, model.make_cache, LONG)) or DecodingCheck()
    return model, replace(check, reuse="")


class Faults:
    """Raises `error` in the call that is due, and counts."""

    def __init__(self) -> None:
        self.due = -1
        self.error: type[Exception] = Fault
        self.raised = 0

    def look(self) -> None:
        self.due -= 1
        if self.due == 0:
            self.raised += 1
            raise self.error("planted")

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.look()
            return function(*args, **kwargs)

        return call


class Failing:
    """A model whose passes may fail. After an error of the device the rows of the pass hold anything."""

    def __init__(self, model: Any, faults: Faults) -> None:
        self._model, self._faults = model, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        try:
            self._faults.look()
        except RuntimeError:
            for leaf in leaves(cache):
                kind = kind_of(leaf)
                for name, value in kind.kept(leaf).items() if kind.described else ():
                    kind.put_back(leaf, {name: mx.zeros_like(value) if isinstance(value, mx.array) else value})
            raise
        return self._model(inputs, cache=cache)


class Request:
    """`tokens`: its prompt. `ends`: places in it where earlier prompts and answers end. `said`: upstream's answer."""

    def __init__(self, tokens: tuple[int, ...], ends: tuple[int, ...], said: list[int]) -> None:
        self.tokens, self.ends, self.said = tokens, ends, said
        self.sink = Collected()


class Order:
    """What happens, in an order that `seed` decides."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.random, self.name, self.folder = random.Random(f"{name} {seed}"), name, folder
        self.model, self.check = served(name)
        self.faults = Faults()
        self.requests: list[Request] = []
        self.counts = Counter[str]()
        self.wrong: list[str] = []
        self.drafts = self.random.random() < 0.5
        self.open()

    def open(self) -> None:
        self.engine = Engine(
            self.name,
            Failing(self.model, self.faults),
            self.check,
            self.folder,
            prefill_step_size=self.random.choice([16, 24, 37, "auto"]),
            max_concurrency=ROWS,
        )
        self.scheduler = self.engine.scheduler
        if self.random.random() < 0.5:  # one long prompt and a short one fit in
            self.engine.memory.fixed = int(1.6 * self.engine.store.estimate(MOST_PROMPT))

    # --- what may happen -------------------------------------------------------------

    def begin(self) -> None:
        """A request that goes on from an earlier one, or forks from it anywhere, or is new."""
        base, ends = tuple[int, ...](), tuple[int, ...]()
        if self.requests and self.random.random() < 0.85:
            earlier = self.random.choice(self.requests[-8:])
            base, ends = (*earlier.tokens, *earlier.said), (*earlier.ends, len(earlier.tokens))
            if self.random.random() < 0.5:
                base = base[: self.random.randint(1, len(base))]
                self.counts["forks"] += 1
        base = base[: MOST_PROMPT - 60]
        count = self.random.randint(1, 60) if base else self.random.randint(40, 160)
        tokens = (*base, *(self.random.randrange(5, VOCAB - 5) for _ in range(count)))
        ends = tuple(sorted({place for place in (*ends, len(base)) if 0 < place < len(tokens)}))
        request = Request(tokens, ends, truth(self.model, tokens, self.random.choice(ANSWERS[self.name == TOGETHER])))
        self.requests.append(request)
        self.scheduler.add(self.work(request, str(len(self.requests) - 1)))
        self.counts["requests"] += 1

    def work(self, request: Request, name: str) -> Submit:
        length = len(request.tokens)
        boundaries = tuple(sorted({*request.ends, *(self.random.randint(1, length) for _ in range(2))} - {length}))
        system_end = boundaries[0] if boundaries else 0
        prompt = Prompt(request.tokens, boundaries=boundaries, system_end=system_end, generation=length)
        session = self.random.choice([None, "a", "b", "c"])
        return Submit(name, prompt, Sampling(temperature=0), len(request.said), request.sink, session=session)

    def cancel(self) -> None:
        self.scheduler.cancel(self.random.choice(self.running)[0])
        self.counts["cancels"] += 1

    def guess(self) -> None:
        """Idle work on what may come."""
        request = self.random.choice(self.requests)
        tokens = (*request.tokens, *request.said, 7)
        self.scheduler.add_idle(self.work(Request(tokens, request.ends, [0]), "idle"))

    def squeeze(self) -> None:
        held = self.engine.store.unguarded.resident.nbytes
        self.engine.store.set_budget(self.random.choice([STORED, held // 3, held // 2]))
        self.counts["squeezes"] += 1

    def restart(self) -> None:
        """Whoever runs is cancelled. A byte of a file on disk may have changed meanwhile."""
        for name, _ in self.running:
            self.scheduler.cancel(name)
        self.finish()
        self.end()
        files = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size > 2000)
        if files and self.random.random() < 0.3:
            path = self.random.choice(files)
            content = bytearray(path.read_bytes())
            content[self.random.randrange(len(content))] ^= 255
            path.write_bytes(content)
            self.counts["damaged files"] += 1
        self.open()
        self.counts["restarts"] += 1

    # --- playing ------------------------------------------------------------------------

    @property
    def running(self) -> list[tuple[str, Request]]:
        return [(str(n), request) for n, request in enumerate(self.requests) if request.sink.final is None]

    def play(self, turns: int) -> None:
        with self.drafted() if self.drafts else ExitStack(), self.failing():
            for _ in range(turns):
                if self.random.random() < 0.25:
                    self.faults.due, self.faults.error = (
                        self.random.randint(1, 60),
                        self.random.choice([Fault, RuntimeError]),
                    )
                running = len(self.running)
                choices = [self.begin] * (6 if running < ROWS + 1 else 0) + [self.squeeze, self.restart]
                choices += [self.guess] if self.requests else []
                choices += [self.cancel] if running else []
                try:
                    happens = self.random.choice(choices)
                    for _ in range(2 if happens == self.begin and self.name == TOGETHER else 1):
                        happens()
                except (Fault, RuntimeError) as error:
                    assert "planted" in str(error)
                for _ in range(self.random.randint(1, 14)):
                    engine_step(self.scheduler)
            self.faults.due = -1
            self.finish()
            self.end()
        self.judge()

    def end(self) -> None:
        figures = self.scheduler.figures()
        self.counts.update({told: int(figures.get(name, 0)) for name, told in FIGURES.items()})
        self.engine.end()

    def finish(self) -> None:
        for _ in range(5_000):
            if not self.scheduler.busy:
                return
            engine_step(self.scheduler)
        raise AssertionError("it does not come to an end")

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Calls of the layer kit and copies of KV may fail, and rows outgrow what was reserved for them."""
        with ExitStack() as patched:
            patched.enter_context(patch.multiple(preemption, TYPICAL_ANSWER=2, LEAST_ANSWER=2, GROWTH=2))
            for method in METHODS:
                patched.enter_context(patch.object(LayerKit, method, self.faults.wrapped(getattr(LayerKit, method))))
            patched.enter_context(patch.object(BatchRunner, "decode", self.counted(BatchRunner.decode)))
            for module in (layers, layerwise):
                patched.enter_context(patch.object(module, eval_and_free.__name__, self.faults.wrapped(eval_and_free)))
            yield

    def counted(self, decode: Callable[[BatchRunner], list[DecodeRow]]) -> Callable[[BatchRunner], list[DecodeRow]]:
        """Counts steps of several rows."""

        def step(runner: BatchRunner) -> list[DecodeRow]:
            self.counts["steps of several rows"] += len(runner._batch._generation_batch.uids) > 1
            return decode(runner)

        return step

    @contextmanager
    def drafted(self) -> Iterator[None]:
        """Rows that decode alone verify up to four tokens: what follows, wrong from some place on, or what does not."""

        def draft(row: SingleRow, token: int, carried: Sequence[int], ahead: Any) -> Proposal | None:
            room = min(4, row._longest(len(carried)))
            if room < 1:
                return None
            tokens = self.following([*row.state.tokens, *carried, token])[:room]
            tokens += [self.random.randrange(VOCAB) for _ in range(room - len(tokens))]
            wrong = self.random.randint(0, room)
            tokens[wrong:] = [(each + 1) % VOCAB for each in tokens[wrong:]]
            self.counts["drafts"] += 1
            return Proposal(tokens, 1)

        with patch.object(SingleRow, "_draft", draft), patch.object(DraftGate, "hopeful", lambda *_, **__: True):
            yield

    def following(self, text: list[int]) -> list[int]:
        for request in self.requests:
            whole = [*request.tokens, *request.said]
            if whole[: len(text)] == text:
                return whole[len(text) :]
        return []

    def judge(self) -> None:
        for number, request in enumerate(self.requests):
            final, found = request.sink.final, request.sink.tokens
            if isinstance(final, Failed):
                assert self.faults.raised, final
                self.counts["failed"] += 1
                continue
            done = request.sink.done
            self.counts["prompt tokens"] += len(request.tokens)
            self.counts["reused"] += done.report.reused
            self.counts["answered"] += done.reason == "length"
            if found != request.said[: len(found)] or (done.reason == "length") != (len(found) == len(request.said)):
                self.wrong.append(f"request {number}: {found} ({done.reason}), not {request.said}")
        self.counts["faults"] += self.faults.raised


def play(name: str, seeds: range, turns: int = 14) -> Counter[str]:
    """Counts of what happened. Raises AssertionError: an answer was another one than upstream's."""
    counts, wrong = Counter[str](), list[str]()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            order = Order(name, seed, Path(folder))
            order.play(turns)
        counts += order.counts
        wrong += [f"{name}, order {seed}, {told}" for told in order.wrong]
    assert not wrong, "\n".join(wrong)
    return counts
