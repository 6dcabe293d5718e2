"""One architecture through the whole engine: its greedy tokens, however they come about, beside mlx-lm's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.events import EngineDone
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.settings import load_settings
from start_llm.core.work import Submit
from start_llm.engine.checks import check_decoding
from start_llm.engine.decode.draft import Proposal
from start_llm.engine.decode.drafting import make_drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.verify import SingleRow
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import TextRuntime, make_store
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.vision import LanguageAlone
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.models.background import at_once
from start_llm.models.capabilities import DecodingCheck
from tests.engine.fakes import Collected, FixedMemory
from tests.models import vlm_types
from tests.models.architectures import VOCAB, make

ANSWER = 10
STORED = 256 << 20
PROMPT = tuple(5 + 7 * place % (VOCAB - 11) for place in range(40))
LONG = tuple(5 + 7 * place % (VOCAB - 11) for place in range(300))
BOUNDARIES = (8, 25, 150, 203)


class Engine:
    """A model as it is served, with its KV in `folder`. It drafts where `wrong_drafts` says what."""

    def __init__(self, name: str, model: Any, check: DecodingCheck, folder: Path, **options: Any) -> None:
        settings = load_settings(None, drafts="off", **options)
        loaded: Any = SimpleNamespace(
            model=model,
            make_cache=lambda: list(make_prompt_cache(model)),
            eos=frozenset(),
            capabilities=SimpleNamespace(decoding=check),
            tokenizer=SimpleNamespace(get_added_vocab=dict),
            style=SimpleNamespace(
                reasoning=SimpleNamespace(end="</think>"), tools=SimpleNamespace(id="none"), openers=lambda tools: ()
            ),
        )
        store = at_once(make_store(settings, loaded, STORED, Ranks(), DiskTier(folder, name, STORED)))
        self.store = store
        self.memory = FixedMemory(4 * STORED, STORED)
        guard, made = MemoryGuard(store, self.memory), ExitStack()
        made.callback(store.close)
        drafts = make_drafts(model, loaded.make_cache, Ranks())
        self._runtime = TextRuntime(settings, loaded, store, guard, drafts, None, made, Ranks())  # type: ignore[arg-type]
        self.scheduler = self._runtime.scheduler
        self._count = 0

    def say(
        self, *prompts: Sequence[int], boundaries: Sequence[int] = BOUNDARIES, cancel_after: int = 0
    ) -> list[tuple[list[int], int]]:
        """Answers of requests that come at the same time: (tokens, prompt tokens that were not computed).

        `cancel_after`: the last of them is cancelled after so many steps.
        """
        sinks = []
        for prompt in prompts:
            self._count += 1
            sink = Collected()
            inside = tuple(place for place in boundaries if place < len(prompt))
            tokens = Prompt(tuple(prompt), boundaries=inside, system_end=boundaries[0], generation=len(prompt))
            work = Submit(str(self._count), tokens, Sampling(temperature=0), ANSWER, sink)
            self.scheduler.add(work)
            sinks.append(sink)
        for step in range(1000):
            if not self.scheduler.busy:
                break
            if step == cancel_after > 0:
                self.scheduler.cancel(str(self._count))
            self.scheduler.step()
        return [(sink.tokens, sink.final.report.reused if isinstance(sink.final, EngineDone) else 0) for sink in sinks]

    def end(self) -> None:
        at_once(self._runtime.unloading())


@contextmanager
def wrong_drafts() -> Iterator[list[Proposal]]:
    """Every row that decodes alone verifies three tokens that are hardly ever right; gives all of them."""
    given = list[Proposal]()

    def draft(row: SingleRow, token: int, carried: Sequence[int], ahead: Any) -> Proposal | None:
        room = min(3, row._longest(len(carried)))
        if room < 1:
            return None
        given.append(Proposal([(token + 17 * place) % VOCAB for place in range(1, room + 1)], 1))
        return given[-1]

    with patch.object(SingleRow, "_draft", draft), patch.object(DraftGate, "hopeful", lambda *_, **__: True):
        yield given


@contextmanager
def engine(name: str, model: Any, check: DecodingCheck, folder: Path) -> Iterator[Engine]:
    found = Engine(name, model, check, folder)
    try:
        yield found
    finally:
        found.end()


def truth(model: Any, prompt: Sequence[int], count: int = ANSWER) -> list[int]:
    """Upstream's own tokens: of mlx-lm's loop, or of a plain loop over a language model of mlx-vlm."""
    if isinstance(model, LanguageAlone):
        return vlm_types.truth(model.language_model, prompt, count)
    return [token for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count)]


def model_of(name: str) -> Any:
    """mlx-lm's model, or the language model alone of mlx-vlm's where only that has the type."""
    return LanguageAlone(vlm_types.make(name).language_model) if name in vlm_types.CONFIGS else make(name)


def try_architecture(name: str) -> dict[str, Any]:
    """What came of each way, by its name: ``equal``, or what differs. ``refused``: it cannot be made here."""
    only_there = name in vlm_types.CONFIGS
    try:
        model = model_of(name)
        truth(model, PROMPT)
    except BaseException as error:  # noqa: BLE001 - one module ends the process when it is imported
        return {"name": name, "refused": f"{type(error).__name__}: {str(error)[:120]}"}
    if only_there or name == "deepseek_v41":  # more tokens than sparse attention keeps; the fork is inside of a group
        return try_model(name, model, LONG, fork_at=203)
    return try_model(name, model, PROMPT)


def try_model(name: str, model: Any, prompt: Sequence[int], fork_at: int = 25) -> dict[str, Any]:
    """The same of a model that was made."""
    make_cache: Any = lambda: list(make_prompt_cache(model))  # noqa: E731
    check = at_once(check_decoding(model, make_cache, prompt)) or DecodingCheck()
    result: dict[str, Any] = {
        "name": name,
        "caches": _kinds(make_cache()),
        "batches": check.batches,
        "reuse": check.reuse,
    }
    turn = (*prompt, *truth(model, prompt), *range(5, 17))
    fork = (*prompt[:fork_at], *range(20, 41))
    with tempfile.TemporaryDirectory() as folder:
        with engine(name, model, check, Path(folder)) as served:
            result["cold"] = _compared(model, served, prompt)
            result["reused"] = _compared(model, served, turn, least=not check.reuse)
            result["forked"] = _compared(model, served, fork, least=not check.reuse)
            result["batch"] = _compared(model, served, prompt[5:17], prompt[3:], turn[7:])
        last = (*turn, *truth(model, turn), *range(30, 42))
        with engine(name, model, check, Path(folder)) as served:
            result["restarted"] = _compared(model, served, last, least=not check.reuse)
            with wrong_drafts() as given:
                result["drafted"] = _compared(model, served, (*prompt[:fork_at], *range(40, 53)))
            if not given:
                result["drafted"] = "no drafts"
            # The state of the cancelled request was stored in the middle of its prompt, or of its answer.
            served.say((*prompt, *range(11, 30)), cancel_after=3)
            result["cancelled"] = _compared(model, served, (*prompt, *range(11, 30)), least=not check.reuse)
            held = served.store.unguarded.resident.nbytes
            served.store.set_budget(held // 3)
            assert served.store.unguarded.resident.nbytes < held
            result["evicted"] = _compared(model, served, last, fork)
    return result


def _compared(model: Any, served: Engine, *prompts: Sequence[int], least: int = 0) -> str:
    """`least`: tokens of the prompt that have to come from stored KV."""
    for prompt, (tokens, cached) in zip(prompts, served.say(*prompts), strict=True):
        expected = truth(model, prompt)
        if tokens != expected:
            same = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), 0)
            return f"{len(tokens)} tokens, other ones from {same} on"
        if cached < least:
            return "nothing was reused"
    return "equal"


def _kinds(cache: Sequence[Any]) -> list[str]:
    return sorted({type(layer).__name__ for layer in cache})
