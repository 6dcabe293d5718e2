"""The command `chat`: a conversation in the terminal, or one answer for a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from rich.console import Console

from start_llm.clients.agent import Endpoint
from start_llm.core.errors import ExitCode
from start_llm.core.settings import Settings
from start_llm.launch.server import LaunchError, running_server

ANSWER_SECONDS = 6 * 3600.0  # a long cold prefill must fit
CONNECT_SECONDS = 10.0
INTERRUPTED = 130
Message = dict[str, str]


class ChatError(RuntimeError):
    """The server has not answered. The message says why."""


@dataclass
class Answer:
    """What the model has said, as far as it came."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


def main(settings: Settings, options: argparse.Namespace) -> int:
    """0 after an answer, 1 if there was none, 2 if nothing was asked."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    asked = "\n\n".join(part for part in (" ".join(options.words), piped.strip()) if part)
    if not asked and not sys.stdin.isatty():
        print('chat: nothing was asked; for instance: git diff | start-llm chat "review this"', file=sys.stderr)
        return ExitCode.BAD_SETTING
    try:
        with running_server(settings, options.overrides, via_proxy=False) as endpoint:
            return once(endpoint, asked, as_json=options.json) if asked else converse(endpoint)
    except (LaunchError, ChatError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def once(endpoint: Endpoint, asked: str, *, as_json: bool) -> int:
    """One answer on standard output: its text, or all of it as a JSON object. Raises ChatError."""
    answer = Answer()
    for text, is_reasoning in ask(endpoint, [{"role": "user", "content": asked}], answer):
        if not is_reasoning and not as_json:
            print(text, end="", flush=True)
    print(json.dumps(asdict(answer), ensure_ascii=False) if as_json else "")
    return 0


def converse(endpoint: Endpoint) -> int:
    """Until the end of input. Ctrl-C ends an answer, not the conversation."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{endpoint.model}. Ctrl-C ends an answer, Ctrl-D the conversation.", style="dim")
    messages: list[Message] = []
    while True:
        try:
            asked = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not asked:
            continue
        messages.append({"role": "user", "content": asked})
        answer = Answer()
        try:
            for text, is_reasoning in ask(endpoint, messages, answer):
                console.print(text, style="dim" if is_reasoning else None, end="", markup=False)
        except KeyboardInterrupt:
            console.print(" (ended)", style="dim", end="")
        except ChatError as error:
            console.print(f"{error}", style="red", markup=False)
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": answer.text})


def ask(endpoint: Endpoint, messages: list[Message], answer: Answer) -> Iterator[tuple[str, bool]]:
    """Fills `answer` as the server streams it; gives each piece of text, and whether it is reasoning.

    Leaving early ends the work behind it. Raises ChatError.
    """
    body = {
        "model": endpoint.model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": endpoint.answer,
    }
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False) as client,
            client.stream("POST", f"{endpoint.v1}/chat/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ChatError(_reason(response))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield from _take(json.loads(data), answer)
    except httpx.HTTPError as error:
        raise ChatError(f"{endpoint.url} has broken off: {error or type(error).__name__}") from error


def _take(chunk: dict[str, Any], answer: Answer) -> Iterator[tuple[str, bool]]:
    if "error" in chunk:
        raise ChatError(str(chunk["error"].get("message", chunk["error"])))
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if thought := delta.get("reasoning_content"):
            answer.reasoning += thought
            yield thought, True
        if text := delta.get("content"):
            answer.text += text
            yield text, False
        answer.finish = choice.get("finish_reason") or answer.finish


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
