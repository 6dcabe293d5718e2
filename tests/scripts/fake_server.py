"""A chat-completions server on the oracle without any cache: every request is computed whole."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.bench.counting import text_of
from tests.oracle import Oracle, make_tokenizer
from tests.web import Handler, running

TOKENIZER = make_tokenizer()
THOUGHT = re.compile(r"^<think>\n(.*?)\n</think>\n\n", re.DOTALL)
CALL = re.compile(r"\n?<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    made = {**message, "content": text_of(message.get("content"))}
    for call in made.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return made


def count(text: str) -> int:
    """Tokens."""
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


def chunks(text: str) -> Iterator[dict[str, Any]]:
    """The deltas of an answer: reasoning, text in two pieces, calls."""
    if match := THOUGHT.match(text):
        yield {"reasoning_content": match[1]}
        text = text[match.end() :]
    visible = CALL.sub("", text)
    for piece in (visible[:10], visible[10:]):
        if piece:
            yield {"content": piece}
    for index, found in enumerate(CALL.findall(text)):
        call = json.loads(found)
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        yield {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function", "function": function}]}


class OracleHandler(Handler):
    oracle: Oracle
    lock: threading.Lock

    def _send(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "oracle"}]})

    def do_POST(self) -> None:
        body = self.asked()
        with self.lock:
            prompt = self.oracle.prompt([_for_template(m) for m in body["messages"]], tools=body.get("tools"))
            text = self.oracle.tokenizer.decode(self.oracle.generate(prompt))
        self.send_response(200)
        self.end_headers()
        for delta in chunks(text):
            self._send({"choices": [{"index": 0, "delta": delta}]})
        self._send({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        report = {"prompt": len(prompt), "reused": 0, "computed": len(prompt), "new": 1}
        self._send({"choices": [], "usage": {"prompt_tokens": len(prompt), "start_llm": report}})
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def fake_server(checkpoint: Path) -> Iterator[str]:
    """Runs it on a free port; gives its URL."""
    with running(type("", (OracleHandler,), {"oracle": Oracle.load(checkpoint), "lock": threading.Lock()})) as port:
        yield f"http://127.0.0.1:{port}"
