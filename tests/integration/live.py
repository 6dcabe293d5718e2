"""A whole server in this process on an oracle checkpoint, with every prompt and every forward pass in sight."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from start_llm.app import App
from start_llm.core.settings import load_settings
from start_llm.core.work import Submit
from tests.model_thread import on_model_thread
from tests.oracle import expected_truth
from tests.vendors import openai

WAIT = 60.0
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read", "edit", "run")
]


@dataclass
class Live:
    """
    Attributes:
        cache: the folder of its files.
        prompts: tokens of every prompt that reached the engine, by the response's id.
    """

    app: App
    cache: Path
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.app.server_url

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=WAIT, **more)

    def figure(self, name: str) -> float:
        """Of `/metrics`."""
        lines = self.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"start_llm_{name} "))

    def work(self) -> int:
        """Prompt tokens that went through the model so far, re-anchoring included."""
        return int(on_model_thread(self.app, lambda model, _: model.work.computed))

    def passes(self) -> int:
        """How many passes there were so far."""
        return int(on_model_thread(self.app, lambda model, _: len(model.work.passes)))

    def prompt_work(self, prompt: int, since: int) -> int:
        """What passes behind the first `since` computed of a prompt of so many tokens; no other request ran."""
        made = on_model_thread(self.app, lambda model, _: list(model.work.passes[since:]))
        places = [(n, offset) for one in made for n, offset in zip(one.tokens, one.offsets, strict=True)]
        return sum(max(0, min(offset + n, prompt) - offset) for n, offset in places)

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One request; the answer's message, with the whole body under ``body``."""
        body = {"model": "default", "messages": messages, **more}
        response = self.post("/v1/chat/completions", json=body)
        data = response.json()
        assert response.status_code == 200, data
        message = data["choices"][0]["message"]
        return {"message": message, "body": data, "report": data["usage"]["start_llm"], "headers": response.headers}

    @contextmanager
    def submitted(self) -> Iterator[list[Submit]]:
        """What the model thread is given to do meanwhile."""
        seen, submit = list[Submit](), self.app.engine.submit
        with patch.object(self.app.engine, "submit", lambda work: (seen.append(work), submit(work))):
            yield seen

    def prompt_of(self, answer: dict[str, Any]) -> tuple[int, ...]:
        return self.prompts[answer["body"]["id"]]

    def turn(self, messages: list[dict[str, Any]], text: str, **more: Any) -> dict[str, Any]:
        """One more turn of a conversation, which grows by it; the model has seen the prompt that it was given.
        The report."""
        messages.append({"role": "user", "content": f"{text}[[truth]]"})
        answer = self.chat(messages, **more)
        assert answer["message"]["content"] == expected_truth(self.prompt_of(answer))
        messages.append(echoed(answer["message"], "keep"))
        return dict(answer["report"])


def send_raw(url: str, messages: list[dict[str, Any]], *, held: int = 0, **more: Any) -> socket.socket:
    """A connection on which something was asked for, whose end its client need not see.

    Its client takes little at a time. `held`: so many bytes of the body are not sent.
    """
    body = json.dumps({"model": "default", "messages": messages, **more}).encode()
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=WAIT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body[: len(body) - held])
    return connection


Start = Callable[..., AbstractContextManager[Live]]
"""Starts a server of a test's own: see the fixture."""
ENDLESS = {"drafts": False, "repetition_guard": False}
"""Fields of a request: with drafts a filler of 400 words is over in 30 passes, and the guard cuts a longer one."""


def places(model: Path, cache: Path) -> dict[str, Any]:
    """The settings of a server without a proxy, on any port, whose files lie in `cache`."""
    made = {"model_path": str(model), "trust_remote_code": True, "start_llm_cache_dir": cache, "mlx_port": 0}
    return made | {"proxy": "off", "log_root": cache / "logs"}


@contextmanager
def live(model: Path, cache: Path, **settings: Any) -> Iterator[Live]:
    """A started server; settings as keyword arguments."""
    quiet = {"kv_disk_dir": "off", "reanchor": "off", "log_json": True, "default_temperature": 0.0, "drafts": "auto"}
    app = App(load_settings(None, **places(model, cache) | quiet | settings), say=lambda line: None)
    server = Live(app, cache)
    engine = app.engine
    submit = engine.submit

    def seen(work: Submit) -> None:
        server.prompts[work.id.rsplit("#", 1)[0]] = work.prompt.tokens
        submit(work)

    engine.submit = seen  # type: ignore[method-assign]
    app.start()
    try:
        yield server
    finally:
        app.stop()


def echoed(message: dict[str, Any], how: str) -> dict[str, Any]:
    """An assistant message the way a client sends it back.

    ``strip``: without its reasoning; ``keep``: as it came; ``both``: the reasoning in `reasoning_content` and as a
    ``<think>`` block in the content; ``retyped``: stripped, arguments re-serialised, ids changed.
    """
    back: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    reasoning = message.get("reasoning_content")
    calls = message.get("tool_calls")
    if reasoning and how in {"keep", "both"}:
        back["reasoning_content"] = reasoning
    if reasoning and how == "both":
        back["content"] = f"<think>\n{reasoning}\n</think>\n\n{message.get('content') or ''}"
    if calls:
        back["tool_calls"] = [dict(call) for call in calls]
        if how == "retyped":
            for i, call in enumerate(back["tool_calls"]):
                arguments = json.loads(call["function"]["arguments"])
                tight = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
                back["tool_calls"][i] = {
                    **call,
                    "id": f"call{i}x",
                    "function": {**call["function"], "arguments": tight},
                }
    return back
