"""What happens during a request. Frozen, so that they may cross threads.

Two streams exist. The *engine* (model thread) sends `EngineEvent`s: tokens and numbers. `chat` (an HTTP thread) turns
them into `Event`s: text, reasoning and tool calls, which the dialects write down. Each stream ends in exactly one final
event (`EngineDone` or `Failed`; `Done` or `Failed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from start_llm.core.errors import StartLLMError
from start_llm.core.report import CacheReport

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural-log probability and its likeliest alternatives (id, logprob).

    `text`: what the token added to a raw answer, ``""`` where its character was not complete; ``None`` in a chat.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str | None = None


# --- both streams: from the model thread, and with more in it from `chat` -----


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is planned; `report.prompt` and `report.reused` are final, its `computed` is still a plan."""

    report: CacheReport


@dataclass(frozen=True, slots=True)
class Progress:
    """A sign of life while queued or computing."""

    done: int  # prompt tokens in the KV so far, reused ones included, of `total`; 0 of 0 while queued
    total: int
    computed: int = 0  # prompt tokens that went through the model for this request so far; the model thread tells it


@dataclass(frozen=True, slots=True)
class Failed:
    """`report`: counts of the work that was done for it; ``None``: the model thread cannot tell, or `chat` has it."""

    error: StartLLMError
    report: CacheReport | None = None


# --- engine -> chat ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampled:
    """One generated token; the end-of-turn token is not sent."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class EngineDone:
    """The generation ended."""

    # ``stop`` (an end-of-turn token), ``length``, ``cancelled``, or ``deadline`` (the watchdog ended it)
    reason: Literal["stop", "length", "cancelled", "deadline"]
    tokens: tuple[int, ...]  # all generated tokens, the end-of-turn token included if there was one
    # final counts, of work that was done. `computed` is not what was planned where the request ended early.
    report: CacheReport


EngineEvent = Started | Progress | Sampled | EngineDone | Failed


# --- chat -> dialects -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer was decoded, whenever the client is going to see it."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Visible text. `logprobs` are those of the tokens that ended in this delta, if asked for."""

    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The call's name is known. `index` counts the calls of this choice from 0."""

    index: int
    id: str
    name: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of the arguments' JSON text."""

    index: int
    arguments: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """The call is complete; `arguments` is the whole JSON text (the deltas, joined)."""

    index: int
    id: str
    name: str
    arguments: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Searched:
    """The calls of a `ToolSearch` were answered: (call's id, names of the tools that were found, what is wrong).

    The answer goes on behind it, unless calls of the client's own tools are left.
    """

    results: tuple[tuple[str, tuple[str, ...], str], ...]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """A choice is complete. `stop_sequence` is the client's stop string that ended it, if one did."""

    finish_reason: FinishReason
    choice: int = 0
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices. `completion` includes `reasoning`."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Done:
    usage: Usage
    report: CacheReport


Event = (
    Started
    | Progress
    | FirstToken
    | ReasoningDelta
    | TextDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallFinished
    | Searched
    | ChoiceDone
    | Done
    | Failed
)
