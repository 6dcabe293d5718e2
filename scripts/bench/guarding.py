"""What it costs to keep text from becoming control tokens: prompts with the guard and without it, in turns.

Two figures, since a whole prompt's time varies by more than the guard takes: how much longer a prompt takes with it
(CPU time of the thread), and the time inside the guard's methods, without what they take while they have no names.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from scripts.bench.texts import Writer
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.prompt.guard import Guard
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.prepared import Prepared
from tests.prompt.models import model

TOOLS = 30
_OFTEN = 10_000  # tokens: a shorter prompt is made more often
_METHODS = ("message", "function", "name", "value", "text")


@dataclass
class Cost:
    """Milliseconds to make a prompt: without the guard, with it, and inside it."""

    off: list[float]
    on: list[float]
    inside: list[float]

    def shares(self) -> dict[str, float]:
        """Per cent of a prompt without the guard; `low` by the minima."""
        low, middle = min(self.off), statistics.median(self.off)
        return {
            "ms": round(low, 2),
            "longer_low": round(100 * (min(self.on) / low - 1), 2),
            "longer_median": round(100 * (statistics.median(self.on) / middle - 1), 2),
            "inside_low": round(100 * min(self.inside) / low, 2),
            "inside_median": round(100 * statistics.median(self.inside) / middle, 2),
        }


class _Inside:
    """Seconds inside the guard's methods, those that they call not counted twice."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, method: Callable[..., Any], *given: Any) -> Any:
        if self._depth:
            return method(*given)
        self._depth, began = 1, time.thread_time()
        try:
            return method(*given)
        finally:
            self.seconds += time.thread_time() - began
            self._depth = 0


def conversation(size: int, count: Callable[[str], int]) -> tuple[list[Message], list[Tool]]:
    """An agent's history of about `size` tokens with calls, results and thoughts; the last result has no answer yet."""
    writer = Writer(f"guard-{size}")
    given = [tool["function"] for _ in range(TOOLS // 5) for tool in writer.tools()]
    tools = [Tool(f"{one['name']}_{n}", one["description"], one["parameters"]) for n, one in enumerate(given)]
    messages = [Message("system", writer.system(min(100, size // 100))), Message("user", writer.task(5))]
    held = count(messages[0].content)
    while held < size:
        name, arguments = writer.call()
        call = ToolCall(f"call{len(messages):05d}", name, json.dumps(arguments))
        said = Message("assistant", writer.prose(2), reasoning=writer.prose(3), tool_calls=(call,))
        result = Message("tool", writer.code(60 if len(messages) % 3 else 5), tool_call_id=call.id)
        messages += [said, result]
        held += sum(count(text) for text in (said.content, said.reasoning or "", result.content))
    return messages, tools


def _request(messages: list[Message], tools: list[Tool]) -> ChatRequest:
    """As it comes by HTTP: of objects that were not here before."""
    mine = tuple(replace(one, tool_calls=tuple(map(copy.copy, one.tool_calls))) for one in messages)
    return ChatRequest("r", "chat", "m", mine, tuple(copy.deepcopy(tools)), session="s")


def _spent(prepare: Callable[[], Prepared]) -> tuple[float, Prepared]:
    began = time.thread_time()
    prepared = prepare()
    return (time.thread_time() - began) * 1000, prepared


def _inside(prepare: Callable[[], Prepared], guard: Guard) -> float:
    inside = _Inside()
    timed: dict[str, Any] = {name: partial(inside.timed, getattr(guard, name)) for name in _METHODS}
    with patch.multiple(guard, **timed):
        prepare()
    return inside.seconds * 1000


def _cost(pipes: Callable[[], list[Pipeline]], request: Callable[[], ChatRequest], rounds: int) -> Cost:
    """`pipes`: with the guard, and without it."""
    times: list[list[float]] = [[], []]
    within: list[list[float]] = [[], []]
    for number in range(rounds):
        for which, pipe in list(enumerate(pipes()))[:: (1, -1)[number % 2]]:
            times[which].append(_spent(partial(pipe.prepare, request(), thinking=True))[0])
        for which, pipe in enumerate(pipes()):
            guard = pipe._composer.renderer._guard
            within[which].append(_inside(partial(pipe.prepare, request(), thinking=True), guard))
    return Cost(times[1], times[0], [on - min(within[1]) for on in within[0]])


def costs(family: str, size: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Of the first prompt of a conversation (`cold`), and of the one behind its next answer (`warm`)."""
    template, tokenizer = model(family)
    settings = [Settings(_env_file=None, allow_control_tokens=allowed) for allowed in (False, True)]  # type: ignore[call-arg]
    traits = Pipeline(template, tokenizer, settings=settings[0]).traits
    messages, tools = conversation(size, lambda text: len(tokenizer.encode(text)))
    rounds *= 1 + 3 * (size < _OFTEN)

    def new() -> list[Pipeline]:
        return [Pipeline(template, tokenizer, settings=each, traits=traits) for each in settings]

    cold = _cost(new, lambda: _request(messages, tools), rounds)
    writer, pipes = Writer("next"), new()
    answer = Message("assistant", writer.prose(3), tool_calls=(ToolCall("call99999", "read_0", '{"path": "a.py"}'),))
    generated = [*tokenizer.encode(f"{answer.content} read_0 call"), *list(tokenizer.eos_ids)[:1]]
    for pipe in pipes:
        prepared = pipe.prepare(_request(messages, tools), thinking=True)
        pipe.record(prepared, answer, generated)
    following = [*messages, answer, Message("tool", writer.code(20), tool_call_id="call99999")]
    assert pipes[0].prepare(_request(following, tools), thinking=True).view.base is not None
    warm = _cost(lambda: pipes, lambda: _request(following, tools), 2 * rounds)
    for turn, cost in (("cold", cold), ("warm", warm)):
        yield {"family": family, "tokens": len(prepared.prompt.tokens), "turn": turn} | cost.shares()
