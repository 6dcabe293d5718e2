"""How long a decoding row waits while another model is loaded, and for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import GeneratorType
from typing import Any

import httpx
import pytest

from start_llm.engine import runtime
from start_llm.engine.decode import constraint
from start_llm.engine.loop import Chores, LoadedModels
from start_llm.modelpool import builder as building
from start_llm.modelpool import kinds
from start_llm.models import loader, probe, tool_probe
from start_llm.models.background import in_background
from tests.integration.live import WAIT, Live
from tests.integration.pooled import SMOL, admin, link_smol
from tests.models.large import make_large
from tests.waiting import until

IN_BACKGROUND = (building, runtime, probe, loader, tool_probe)
READS = ((building, "read_ahead"), (building, "read_tokenizer"), (constraint, "make_vocabulary"))


@dataclass
class Watch:
    """What the model thread and the loader's helpers did, and when (``time.perf_counter``).

    Attributes:
        steps: ends of the steps of models.
        done: (begin, end, what) of everything else.
    """

    steps: list[float] = field(default_factory=list)
    done: list[tuple[float, float, str]] = field(default_factory=list)

    @contextmanager
    def note(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.done.append((began, time.perf_counter(), what))

    def clear(self) -> None:
        self.steps.clear()
        self.done.clear()

    def longest(self) -> dict[str, tuple[float, float]]:
        """(longest gap between two steps that it had the most part in, its own longest time) by what it was."""
        found: dict[str, tuple[float, float]] = {}
        for began, end, what in self.done:
            found[what] = (0.0, max(found.get(what, (0.0, 0.0))[1], end - began))
        for begin, end in zip(self.steps, self.steps[1:], strict=False):
            parts = [(min(end, e) - max(begin, b), what) for b, e, what in self.done if b < end and e > begin]
            what = max(parts)[1] if parts else "nothing"
            gap, own = found.get(what, (0.0, 0.0))
            found[what] = (max(gap, end - begin), own)
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    chore, step = Chores.step, LoadedModels.step

    def chore_seen(chores: Any) -> None:
        loading = chores._waiting[0].steps if chores._waiting else None
        before = _place(loading)
        began = time.perf_counter()
        chore(chores)
        if loading is not None:
            watch.done.append((began, time.perf_counter(), f"step from {before} to {_place(loading)}"))

    def step_seen(models: Any, model: Any) -> None:
        step(models, model)
        if models.get("") is model.scheduler:
            watch.steps.append(time.perf_counter())

    def background_seen(function: Callable[[], Any], *more: Any) -> Generator[float, None, Any]:
        def noted() -> Any:
            with watch.note(f"background {_name(function)}"):
                return function()

        return (yield from in_background(noted, *more))

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            with watch.note(f"loader's thread: {what}"):
                return function(*args, **named)

        return run

    monkeypatch.setattr(Chores, "step", chore_seen)
    monkeypatch.setattr(LoadedModels, "step", step_seen)
    for module in IN_BACKGROUND:
        monkeypatch.setattr(module, "in_background", background_seen)
    for module, name in READS:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(kinds, "make_handle", noted("make_handle", kinds.make_handle))
    return watch


def _name(function: Any) -> str:
    """Also of a `functools.partial`."""
    return str(getattr(function, "func", function).__qualname__).replace(".<locals>", "")


def _place(steps: Any) -> str:
    """Where the innermost generator stands."""
    if steps is None or steps.gi_frame is None:
        return "the end"
    while isinstance(steps.gi_yieldfrom, GeneratorType):
        steps = steps.gi_yieldfrom
    return f"{steps.gi_code.co_qualname}:{steps.gi_frame.f_lineno}"


@contextmanager
def decoding(server: Live) -> Iterator[None]:
    """A row of the main model decodes meanwhile."""
    body = {"model": "default", "messages": [{"role": "user", "content": "[[long 60000]]"}], "stream": True}
    leave, decodes = threading.Event(), threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as stream:
            for count, _ in enumerate(stream.iter_raw()):
                if count == 5:
                    decodes.set()
                if leave.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert decodes.wait(WAIT)
        yield
    finally:
        leave.set()
        reader.join(WAIT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tokens", [0, 151_936, 248_320])
def test_a_row_goes_on_while_another_model_is_loaded_and_unloaded(
    serve: Callable[..., Any], smol_path: Path, tmp_path: Path, watch: Watch, tokens: int
) -> None:
    """Prints the longest gap between two of its steps by what was done meanwhile: first load, unload, second load.

    `tokens`: of the model's vocabulary; 0: SmolLM2, which has 49,152.
    """
    if tokens:
        make_large(tmp_path / "models" / SMOL, tokens)
    else:
        link_smol(tmp_path, smol_path)
    with serve(model_probe="on") as server, decoding(server):
        for what in ("load", "unload", "load"):
            watch.clear()
            began = time.perf_counter()
            until(lambda what=what: admin(server, what, model=SMOL).status_code == 200)  # type: ignore[misc]
            took = time.perf_counter() - began
            enough = len(watch.steps) + 20
            until(lambda enough=enough: len(watch.steps) > enough)  # type: ignore[misc]
            gaps = sorted(b - a for a, b in zip(watch.steps, watch.steps[1:], strict=False))
            print(f"\n{what}: {took:.2f} s, {len(gaps)} steps; gaps: median {gaps[len(gaps) // 2] * 1000:.1f} ms, ")
            print(f"  longest {[round(gap * 1000) for gap in gaps[:-6:-1]]} ms")
            for name, (gap, own) in sorted(watch.longest().items(), key=lambda item: -max(item[1])):
                if max(gap, own) > 0.02:
                    print(f"  {gap * 1000:7.0f} ms gap {own * 1000:7.0f} ms own  {name}")
            if what == "load":
                server.chat([{"role": "user", "content": "Hi"}], model=SMOL, max_tokens=4)
