"""Runs random turns on a server, alone or with followers, and prints what was said: ``python turns.py '{...}'``.

A process of its own, because MLX connects a process to others only once.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from start_llm.app import App
from start_llm.core.events import EngineDone, Failed, Sampled
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.settings import Settings
from start_llm.core.work import Submit

WAIT = 300.0  # seconds


class RandomTurns:
    """Conversations that go on, fork, run side by side and are cancelled; the same for the same seed."""

    def __init__(self, app: App, seed: int, greedy: bool) -> None:
        self._app, self._random, self._greedy = app, random.Random(seed), greedy
        self._ends: list[tuple[int, ...]] = [()]
        self._sent = 0
        self.said: list[Any] = []
        self.counts: Counter[str] = Counter()

    def turn(self) -> None:
        """One to three requests at once. A cancelled one ends anywhere, so its words are not told."""
        pick, running = self._random, []
        number = pick.choice((1, 1, 2, 3))
        self.counts["side by side"] += number if number > 1 else 0
        for _ in range(number):
            base = pick.choice(self._ends)
            if pick.random() < 0.3:
                base = base[: pick.randrange(len(base) + 1)]
                self.counts["forked"] += 1
            new = tuple(pick.randrange(2, 250) for _ in range(pick.randrange(1, 60))) * pick.choice((1, 1, 2, 3))
            running.append((self._submit((*base, *new)), pick.random() < 0.15))
        for (work, events), cancelled in running:
            if cancelled:
                self._app.engine.cancel(work.id)
                self.counts["cancelled"] += 1
            words = self._words(events)
            if not cancelled:
                self.said.append(words)
                self._ends = [*self._ends[-6:], (*work.prompt.tokens, *words)[:900]]

    def _submit(self, tokens: tuple[int, ...]) -> tuple[Submit, SimpleQueue[Any]]:
        self._sent += 1
        events: SimpleQueue[Any] = SimpleQueue()
        few = self._random.random() < 0.5  # of a few tokens only: these repeat, so drafts are right
        bias = tuple((token, 60.0) for token in (5, 6, 7)) if few else ()
        sampling = Sampling(temperature=0.0 if self._greedy else 0.8, seed=self._sent, logit_bias=bias)
        prompt = Prompt(tokens, tuple(range(64, len(tokens), 64)), generation=len(tokens))
        model = self._app.pool.main_runtime and next(iter(self._app.engine._loop.models._models))
        most = self._random.randrange(1, 60 if few else 24)
        work = Submit(
            f"r{self._sent}", prompt, sampling, most, events.put, session=f"s{self._sent % 5}", model=model or ""
        )
        self._app.engine.submit(work)
        return work, events

    def _words(self, events: SimpleQueue[Any]) -> list[int]:
        words = []
        while not isinstance(event := events.get(timeout=WAIT), EngineDone):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Sampled):
                words.append(event.token)
        return words


def main(about: dict[str, Any]) -> None:
    mx.set_default_device(mx.Device(mx.cpu))
    home = Path(about["home"])
    more = about.get("settings", {})
    settings = Settings.model_validate(
        {"start_llm_cache_dir": home, "log_root": home / "logs", "proxy": "off", "mlx_port": 0}
        | {"kv_disk_dir": "off", "model_probe": "off", "audit_days": 0, "enable_request_logging": False}
        | {"model_path": about["model"], "hosts": about.get("hosts", ""), "max_concurrency": 3}
        | more
    )
    app = App(settings, say=lambda line: print(line, file=sys.stderr, flush=True))
    app.start()
    turns = RandomTurns(app, about.get("seed", 1), about.get("greedy", True))
    print(json.dumps({"ready": app.url}), flush=True)
    for _ in range(about["turns"]):
        turns.turn()
    figures = app.engine.call(lambda scheduler: scheduler.figures(), model=next(iter(app.engine._loop.models._models)))
    runtime = app.pool.main_runtime
    assert runtime is not None
    weights = sum(array.nbytes for _, array in tree_flatten(runtime.loaded.model.parameters()))
    print(json.dumps({"said": turns.said, "figures": figures, "weights": weights, "counts": turns.counts}), flush=True)
    app.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
