"""``doctor --deep``: whether a model answers the same on this machine in whatever way its KV came about; greedy answers
are compared with those of a server that had nothing stored and no drafts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from start_llm.app import App
from start_llm.cli.doctor import Finding, Verdict
from start_llm.cli.measure import Timed, about, figures, forget, own_server, timed, words
from start_llm.clients.agent import Endpoint
from start_llm.core.errors import StartLLMError
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.launch.chat import ChatError
from start_llm.launch.conversation import Message
from start_llm.models.device import PREFILL_BYTES
from start_llm.models.loader import accelerator, peak_bytes

ANSWER = 48  # tokens
HEAD = 1_200  # words
KV_AT_PEAK = 1.3  # times what a turn's KV takes, docs/memory.md


def deep(settings: Settings) -> Iterator[Finding]:
    """Loads the model three times: with drafts as set, without them, and once more after that."""
    try:
        yield Finding("deep", "ok", "first three prompts are computed cold; on a slow machine that takes minutes")
        with tempfile.TemporaryDirectory(prefix="start-llm-doctor-") as folder:
            yield from _compare(settings, Path(folder))
    except (StartLLMError, ChatError) as error:
        yield Finding("deep", "bad", f"a server on this model fails: {error}")


def _compare(settings: Settings, folder: Path) -> Iterator[Finding]:
    first, forked, other = prompts(folder)
    with own_server(settings, folder, drafts="off", kv_disk_dir=str(folder / "kv")) as (app, endpoint):
        cold = timed(endpoint, first, ANSWER)
        follow: list[Message] = [*first, cold.message, *forked]
        forget(app)
        expected = timed(endpoint, follow, ANSWER)
        forget(app)
        alone = timed(endpoint, other, ANSWER)
        model = endpoint.model
    with own_server(settings, folder, drafts="off", kv_disk_dir=str(folder / "kv")) as (_, endpoint):
        found = timed(endpoint, first, ANSWER)
        yield same("after a restart", cold, found, reused=True)
    with own_server(settings, folder) as (app, endpoint):
        yield same("with drafts" if settings.drafts != "off" else "cold, again", cold, timed(endpoint, first, ANSWER))
        yield same("reused", cold, timed(endpoint, first, ANSWER), reused=True)
        yield same("forked", expected, timed(endpoint, follow, ANSWER), reused=True)
        forget(app)
        for name, right, found in zip(("first", "second"), (cold, alone), at_once(endpoint, first, other), strict=True):
            yield same(f"in a batch, {name}", right, found)
        yield _memory(app, endpoint)
    yield Finding("about", "ok", "; ".join(about(model)))


def prompts(seed: object) -> tuple[list[Message], list[Message], list[Message]]:
    """A conversation, what goes on behind its answer, and a stranger's shorter prompt."""
    head: Message = {"role": "system", "content": f"You answer in plain words. {words(HEAD, f'{seed} a')}"}
    asked: Message = {"role": "user", "content": "Tell a short story about a lighthouse, and count its steps."}
    again: Message = {"role": "user", "content": "Write it once more, word by word, and then say what comes next."}
    return [head, asked], [again], [{"role": "user", "content": f"{words(HEAD // 4, f'{seed} b')} What was this?"}]


def same(subject: str, right: Timed, found: Timed, *, reused: bool = False) -> Finding:
    """`reused`: something of the prompt must have been."""
    tokens = f"{found.generated} tokens, {found.computed:,} of {found.prompt:,} prompt tokens computed"
    expected, given = (f"{each.reasoning}{each.text}" for each in (right, found))
    if given != expected:
        at = next((i for i, (a, b) in enumerate(zip(expected, given, strict=False)) if a != b), len(given))
        return Finding(subject, "bad", f"another answer from character {at} on ({tokens})")
    if reused and found.computed >= found.prompt:
        return Finding(subject, "bad", f"the same answer, but nothing was reused ({tokens})")
    return Finding(subject, "ok", f"equal: {tokens}")


def at_once(endpoint: Endpoint, *asked: list[Message]) -> list[Timed]:
    """All of them at the same time."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda messages: timed(endpoint, messages, ANSWER), asked))


def _memory(app: App, endpoint: Endpoint) -> Finding:
    """The most that MLX had in use during a turn, beside what docs/memory.md says."""
    forget(app)
    weights = peak_bytes(reset=True)
    found = timed(endpoint, [{"role": "user", "content": words(HEAD, "memory")}], ANSWER)
    peak, kv = peak_bytes(reset=False), figures(app).get("kv_bytes", 0.0)
    allowed = weights + int(KV_AT_PEAK * kv) + PREFILL_BYTES
    text = (
        f"{as_size(peak)} for {found.prompt:,} tokens: {as_size(weights)} before, {as_size(kv)} of KV; at most "
        f"{as_size(allowed)} by docs/memory.md"
    )
    # The bound was not made for CUDA: 1.69 GiB were seen there where it says 1.17 (docs/benchmarks.md).
    beyond: Verdict = "note" if accelerator().backend == "cuda" else "bad"
    return Finding("peak memory", "ok" if peak <= allowed else beyond, text)
