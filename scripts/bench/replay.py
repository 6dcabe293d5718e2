"""Recorded requests, sent again in their order while the oracle answers what was answered then.

A folder of traces holds a folder per client, in it a JSON-lines file per run; an entry has ``path``, ``body`` and
``reply`` (``reasoning``, ``text``, ``calls[{id, name, arguments}]``). Chat completions and Anthropic's messages are
sent, those without images, with the ids that this server gave to its calls in place of the recorded ones, as the client
would have sent them back.

The *optimum* of a request is counted in tokens: what lies beyond the longest common prefix of its plain rendering with
any prompt rendered before, the tokens generated for it included. A request's *new* tokens are what lies beyond that or
beyond any earlier history without its transient message (OpenClaw's last one, which is gone in the next request) with
the answer behind it: what a server would compute that had prepared for the message to go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from scripts.bench.client import Client, Reply
from scripts.bench.counting import text_of
from scripts.bench.servers import Server
from tests.oracle.answers import END
from tests.oracle.log import mark, prompt_work

Json = dict[str, Any]
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
MESSAGES = "/v1/messages"
IMAGES = ('"image_url"', '"type": "image"', '"type":"image"')


@dataclass(frozen=True)
class Replayed:
    """One recorded request: its run (``client/file``), the prompt's tokens, the yardsticks, and what was computed.

    The server may make another prompt of it than the plain rendering: `computed` counts tokens of the server's.
    """

    run: str
    prompt: int
    optimum: int
    new: int
    computed: int
    seconds_to_first: float
    wrong: str | None
    report: Json | None


def recorded(folder: Path, clients: list[str] | None = None) -> Iterator[tuple[str, Json]]:
    """(run, entry) of every request without an image that was answered, client by client, run by run."""
    for file in sorted(folder.glob("*/*.jsonl")):
        if clients and file.parent.name not in clients:
            continue
        for line in file.read_text("utf-8").splitlines():
            entry = json.loads(line)
            known = entry["path"].partition("?")[0] in ("/v1/chat/completions", MESSAGES)
            if known and entry.get("reply") and not any(part in line for part in IMAGES):
                yield f"{file.parent.name}/{file.stem}", entry


def raw_reply(reply: Json) -> str:
    """The recorded answer as a model with Hermes tools writes it."""
    reasoning, text = reply.get("reasoning") or "", reply.get("text") or ""
    parts = [f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "", text]
    for number, call in enumerate(reply.get("calls") or []):
        parts.append("\n" if number or text else "")
        parts.append(
            f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}\n</tool_call>'
        )
    return "".join(parts)


def _for_template(message: Json) -> Json:
    made = {**message, "content": text_of(message.get("content"))}
    if made["role"] == "developer":
        made["role"] = "system"
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        made["tool_calls"] = [{"function": {**f, "arguments": _object(f["arguments"])}} for f in functions]
    return made


def as_chat(body: Json) -> Json:
    """A body of Anthropic's messages as one of chat completions: what a plain rendering takes."""
    system = text_of(body.get("system"))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _as_chat_messages(message)
    tools = []
    for tool in body.get("tools") or []:
        function = {"name": tool["name"], "description": tool.get("description", "")}
        tools.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}})
    return {"messages": messages, "tools": tools}


def _as_chat_messages(message: Json) -> list[Json]:
    """Results of tools as messages of their own, then what is said beside them."""
    content = message["content"]
    results: list[Json] = []
    calls: list[Json] = []
    said = {"text": "", "thinking": ""}
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        match block["type"]:
            case "tool_result":
                results.append({"role": "tool", "content": text_of(block.get("content"))})
            case "tool_use":
                calls.append({"function": {"name": block["name"], "arguments": block["input"]}})
            case "text" | "thinking" as kind:
                said[kind] += block[kind]
    made = {"role": message["role"], "content": said["text"]}
    made |= {"tool_calls": calls} if calls else {}
    made |= {"reasoning_content": said["thinking"]} if said["thinking"] else {}
    return [*results, made] if calls or any(said.values()) else results


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) and arguments else arguments


class Optimum:
    """Token sequences that an ideal server would hold."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
        self.held: list[np.ndarray] = []
        self.prepared: list[np.ndarray] = []

    def _prompt(self, body: Json, messages: list[Json]) -> np.ndarray:
        text = self.tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=body.get("tools"),
            add_generation_prompt=True,
            tokenize=False,
        )
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def of(self, body: Json, answer: str) -> tuple[int, int, int]:
        """(tokens of the prompt, optimum, new); holds the prompt and the answer from now on."""
        messages = body["messages"]
        prompt = self._prompt(body, messages)
        common = max((_common(prompt, other) for other in self.held), default=0)
        prepared = max((_common(prompt, other) for other in self.prepared), default=0)
        generated = np.array([*self.tokenizer.encode(answer, add_special_tokens=False), END], dtype=np.int32)
        self.held.append(np.concatenate([prompt, generated]))
        if text_of(messages[-1].get("content")).startswith(TRANSIENT):
            self.prepared.append(np.concatenate([self._prompt(body, messages[:-1]), generated]))
        return len(prompt), max(1, len(prompt) - common), max(1, len(prompt) - max(common, prepared))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


class CallIds:
    """What calls are named now: for the recorded ids, which clients may send back without ``call_``, the server's."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}

    def learn(self, said: Json, reply: Reply) -> None:
        for recorded_call, call in zip(said.get("calls") or [], reply.calls, strict=False):
            self._now[_bare(recorded_call.get("id", ""))] = call.id

    def put_into(self, body: Json) -> Json:
        return {**body, "messages": [self._named(message) for message in body["messages"]]}

    def _named(self, message: Json) -> Json:
        made = dict(message)
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [{**call, "id": self._now.get(_bare(call["id"]), call["id"])} for call in calls]
        if answered := message.get("tool_call_id"):
            made["tool_call_id"] = self._now.get(_bare(answered), answered)
        if isinstance(message.get("content"), list):
            made["content"] = [self._block(block) for block in message["content"]]
        return made

    def _block(self, block: Json) -> Json:
        """Of Anthropic's API: a call, or its result."""
        named = (name for name in ("id", "tool_use_id") if name in block)
        return {**block, **{name: self._now.get(_bare(block[name]), block[name]) for name in named}}


def _bare(call_id: str) -> str:
    return call_id.removeprefix("call").removeprefix("_")


def _wrong(reply: Reply, said: Json) -> str | None:
    if reply.error:
        return reply.error
    if reply.content.strip() != (said.get("text") or "").strip():
        return f"said {reply.content[:100]!r} instead of {(said.get('text') or '')[:100]!r}"
    names = [call["name"] for call in said.get("calls") or []]
    if [call.name for call in reply.calls] != names:
        return f"called {[call.name for call in reply.calls]} instead of {names}"
    return None


def replay(
    server: Server, checkpoint: Path, folder: Path, clients: list[str] | None = None, pause: float = 0.0
) -> list[Replayed]:
    """Sends every recorded request; waits `pause` seconds before each. The server must have its log and reply file."""
    assert server.log is not None and server.replies is not None
    optimum, client, rows, ids = Optimum(checkpoint), Client(server.url, server.model, server.key), [], CallIds()
    for run, entry in recorded(folder, clients):
        time.sleep(pause)
        body, answer, log = ids.put_into(entry["body"]), raw_reply(entry["reply"]), server.log
        server.replies.write_text(answer, "utf-8")
        anthropic = entry["path"].startswith(MESSAGES)
        prompt, best, new = optimum.of(as_chat(body) if anthropic else body, answer)
        before = mark(log)
        reply = client.ask_messages(body) if anthropic else client.ask(body)
        length = (reply.report or {}).get("prompt") or reply.usage.get("prompt_tokens") or prompt
        computed = prompt_work(log, length, before)
        ids.learn(entry["reply"], reply)
        wrong = _wrong(reply, entry["reply"])
        rows.append(Replayed(run, prompt, best, new, computed, reply.seconds_to_first, wrong, reply.report))
    server.replies.unlink(missing_ok=True)
    return rows


def summary(rows: list[Replayed]) -> list[Json]:
    """A line per run and one for all."""
    lines = []
    for run in [*dict.fromkeys(row.run for row in rows), "all"]:
        mine = [row for row in rows if run in {row.run, "all"}]
        totals = {key: sum(getattr(row, key) for row in mine) for key in ("prompt", "optimum", "new", "computed")}
        lines.append({"run": run, "requests": len(mine), **totals, "wrong": [row.wrong for row in mine if row.wrong]})
    return lines


def as_json(rows: list[Replayed]) -> Json:
    return {"runs": summary(rows), "requests": [asdict(row) for row in rows]}
