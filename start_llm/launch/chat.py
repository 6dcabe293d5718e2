"""The command `chat`: a conversation in the terminal, or one answer for a pipe."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

import start_llm
from start_llm.clients.agent import Endpoint
from start_llm.core.errors import Explained, WrongWords
from start_llm.core.settings import Settings
from start_llm.dashboard.tables import words_only
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.launch.conversation import (
    CommandError,
    Conversation,
    MarkdownPrinter,
    Message,
    image_part,
    typed_before,
    user_message,
)
from start_llm.launch.server import running_server

ANSWER_SECONDS = 6 * 3600.0  # a long cold prefill must fit
CONNECT_SECONDS = 10.0
INTERRUPTED = 130
HISTORY = "chat_history"  # in the cache folder: the lines that were typed, for this user only


class ChatError(Explained):
    """The server has not answered. The message says why."""


@dataclass
class Answer:
    """What the model has said, as far as it came."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


def main(settings: Settings, options: argparse.Namespace) -> int:
    """0 after an answer. Raises WrongWords: nothing was asked; ServiceError, ChatError."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    asked = "\n\n".join(part for part in (" ".join(options.words), piped.strip()) if part)
    if not asked and not sys.stdin.isatty():
        raise WrongWords(f'nothing was asked; for instance: git diff | {program()} chat "review this"')
    try:
        images = [image_part(file) for file in options.image or ()]
    except CommandError as error:
        raise WrongWords(f"--image: {error}") from None
    try:
        with running_server(settings, options.overrides, via_proxy=False) as endpoint:
            if asked:
                return once(endpoint, user_message(asked, images), as_json=options.json)
            return converse(endpoint, home() / settings.cache_dir / HISTORY, images)
    except KeyboardInterrupt:
        return INTERRUPTED


def once(endpoint: Endpoint, asked: Message, *, as_json: bool) -> int:
    """One answer on standard output: its text, or all of it as a JSON object. Raises ChatError."""
    answer = Answer()
    for text, is_reasoning in ask(endpoint, [asked], answer):
        if not is_reasoning and not as_json:
            print(text, end="", flush=True)
    whole = json.dumps(asdict(answer), ensure_ascii=False)  # it writes the controls above 126 as they are
    print(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", whole) if as_json else "")
    return 0


def converse(endpoint: Endpoint, history: Path, images: list[dict[str, Any]]) -> int:
    """Until the end of input. Ctrl-C ends an answer, not the conversation."""
    console = Console(highlight=False, emoji=False)
    talk = Conversation(endpoint, console, images=images)
    talk.say(f"{endpoint.model}. /help lists commands. Ctrl-C ends an answer, Ctrl-D the conversation.")
    with typed_before(history):
        while True:
            try:
                asked = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                break
            try:
                if asked.startswith("/"):
                    if not talk.command(asked):
                        break
                elif asked:
                    _answer(talk, asked)
            except (CommandError, ChatError) as error:
                console.print(words_only(f"{error}"), style="red", markup=False)
    return 0


def _answer(talk: Conversation, asked: str) -> None:
    """One turn. Raises ChatError; what was asked is then not part of the conversation."""
    talk.add(asked)
    answer, printer = Answer(), MarkdownPrinter(talk.console)
    try:
        for text, is_reasoning in ask(talk.endpoint, talk.sent, answer):
            (printer.think if is_reasoning else printer.add)(text)
        printer.end()
    except KeyboardInterrupt:
        printer.end()
        talk.say("(ended)")
    except ChatError:
        printer.end()
        talk.messages.pop()
        raise
    talk.messages.append({"role": "assistant", "content": answer.text})


def ask(endpoint: Endpoint, messages: list[Message], answer: Answer, **more: Any) -> Iterator[tuple[str, bool]]:
    """Fills `answer` as the server streams it; gives each piece of text, without what a terminal would obey, and
    whether it is reasoning.

    `more`: fields of the body. Leaving early ends the work behind it. Raises ChatError.
    """
    body = {
        "model": endpoint.model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": endpoint.answer,
        **more,
    }
    headers = {"Authorization": f"Bearer {endpoint.key}", "User-Agent": f"chat/{start_llm.__version__}"}
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
    except httpx.ConnectError as error:
        raise ChatError(f"no server answers at {endpoint.url} any more; start it again: {program()} start") from error
    except httpx.HTTPError as error:
        raise ChatError(f"{endpoint.url} has broken off: {error or type(error).__name__}") from error
    except (ValueError, AttributeError, TypeError) as error:  # whoever answers there speaks another language
        raise ChatError(f"{endpoint.url} streams what is no chat completion ({error})") from error


def _take(chunk: dict[str, Any], answer: Answer) -> Iterator[tuple[str, bool]]:
    if "error" in chunk:
        raise ChatError(str(chunk["error"].get("message", chunk["error"])))
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if thought := delta.get("reasoning_content"):
            answer.reasoning += thought
            yield words_only(thought), True
        if text := delta.get("content"):
            answer.text += text
            yield words_only(text), False
        answer.finish = choice.get("finish_reason") or answer.finish


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
