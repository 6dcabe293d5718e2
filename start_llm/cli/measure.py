"""A server of one's own, what is asked of it, and what that took: for `bench` and ``doctor --deep``."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import start_llm
from start_llm.app import App
from start_llm.clients.agent import Endpoint
from start_llm.core.settings import Settings
from start_llm.host.processes import wait_until
from start_llm.launch.chat import Answer, ask
from start_llm.launch.conversation import Message
from start_llm.models.device import inspect_device
from start_llm.models.loader import accelerator
from start_llm.models.probe_table import PROBES

WORDS = (
    "the server reads a file and tells which line of it holds the name that was asked for in the last turn red green "
    "blue one two three north south east west river stone paper house garden window letter"
)
WEIGHTS_SECONDS, CALL_SECONDS = 120.0, 60.0
_LIBRARIES = ("mlx", "mlx-lm", "transformers")


@dataclass(frozen=True)
class Timed:
    """One streamed answer: tokens, and seconds to its first and its last piece."""

    prompt: int
    computed: int
    generated: int
    first: float
    seconds: float
    text: str
    reasoning: str = ""

    @property
    def message(self) -> Message:
        """The answer, as the next request sends it again."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought}

    @property
    def prefill(self) -> float:
        """Computed tokens a second."""
        return self.computed / self.first if self.first else 0.0

    @property
    def decode(self) -> float:
        """Tokens a second behind the first one."""
        past = self.seconds - self.first
        return (self.generated - 1) / past if past > 0 and self.generated > 1 else 0.0


def timed(endpoint: Endpoint, messages: list[Message], tokens: int, **more: Any) -> Timed:
    """Asks for at most so many tokens, greedily. `more`: fields of the body. Raises ChatError.

    Takes the server's own report where a proxy lets it through, else OpenAI's `cached_tokens`.
    """
    answer, began, first = Answer(), time.perf_counter(), 0.0
    for _ in ask(endpoint, messages, answer, temperature=0, max_tokens=tokens, **more):
        first = first or time.perf_counter() - began
    seconds, usage = time.perf_counter() - began, answer.usage
    prompt = usage.get("prompt_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    computed = (usage.get("start_llm") or {}).get("computed", prompt - cached)
    generated = usage.get("completion_tokens", 0)
    return Timed(prompt, computed, generated, first or seconds, seconds, answer.text, answer.reasoning)


def words(count: int, seed: object) -> str:
    """So many words, about a token each; another `seed` gives other ones from the first word on."""
    drawn, known = random.Random(str(seed)), WORDS.split()
    return " ".join([f"{drawn.getrandbits(40):x}", *drawn.choices(known, k=count)])


@contextmanager
def own_server(settings: Settings, folder: Path, **changes: object) -> Iterator[tuple[App, Endpoint]]:
    """A server on a free port that keeps nothing outside `folder`; what is known of models is taken from the user's.

    Raises StartLLMError.
    """
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    for name in ("models", PROBES):
        if (settings.cache_dir / name).exists() and not (cache / name).exists():
            (cache / name).symlink_to((settings.cache_dir / name).absolute())
    own = {"mlx_port": 0, "proxy": "off", "start_llm_cache_dir": cache, "kv_disk_dir": "off", "audit_days": 0.0}
    app = App(settings.model_copy(update=own | {"api_key": None, "enable_request_logging": False} | changes))
    try:
        app.start()
        if "kv_disk_dir" in changes:  # nothing is written before all bytes of the weights are known
            wait_until(lambda: figures(app).get("kv_disk_paused") == 0, WEIGHTS_SECONDS)
        card = app.service.models.cards()[0]
        yield app, Endpoint(url=app.url, key="none", model=card.id, context=card.context, answer=1024)
    finally:
        app.stop()


def figures(app: App) -> dict[str, float]:
    """Of the main model's store, as `/metrics` has them; nothing while it is not loaded."""
    runtime = app.pool.main_runtime
    found: dict[str, float] = (
        {} if runtime is None else app.engine.call(lambda _: runtime.store.figures(), CALL_SECONDS)
    )
    return found


def forget(app: App) -> None:
    """Empties the store in memory: the next prompt is computed from its first token on."""
    runtime = app.pool.main_runtime
    if runtime is not None:
        app.engine.call(lambda _: runtime.store.clear(), CALL_SECONDS)


def about(model: str) -> list[str]:
    """What a pasted text begins with."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)
    day = time.strftime("%Y-%m-%d")
    return [
        f"start_llm {start_llm.__version__} ({versions}; Python {platform.python_version()}), {day}",
        f"{inspect_device(accelerator)} {platform.mac_ver()[0] or platform.release()}",
        f"model {model}",
    ]
