"""A recorded session through the whole server, as its client would send it, while the oracle says what was recorded.

What the simulator (`drafting`) computes is what a server could do; this is what ours does: its own index, views, gate,
loop and stored KV, with prompts that it renders and answers that it parses. The oracle answers from what it sees in its
KV, so a token too many or too few in there would change what is said.

The gate goes by a machine's published costs, which stay so, or by what it measures: then the oracle's passes take as
long as a model's would, on a clock of the model thread (`virtual`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from tokenizers import AddedToken, Tokenizer

from scripts.bench.drafting import CallStyle, Published, Totals, drafted_behind, said
from scripts.bench.virtual import VirtualClock
from start_llm.app import App
from start_llm.core.settings import load_settings
from start_llm.engine.decode.gate import DraftGate, DraftOption
from tests.oracle import log as oracle_log
from tests.oracle.build import CONTEXT, SPECIAL

Json = dict[str, Any]
WAIT = 600.0


@dataclass(frozen=True)
class Asked:
    """One answer of a session.

    Attributes:
        before: what the client sends since the answer before it: user messages and tool results.
        answer: as the model writes it.
        calls: recorded ids of its calls, in order.
        message: the answer as a client sends it back.
    """

    before: list[Json]
    answer: str
    calls: list[str]
    message: Json


def asked(path: Path, style: CallStyle) -> Iterator[Asked]:
    """The requests of a session that the PI agent recorded."""
    before: list[Json] = []
    for line in path.read_text("utf-8").splitlines():
        message = json.loads(line).get("message")
        if message is None or not message["content"]:
            continue
        text = "".join(part.get("text", "") for part in message["content"])
        if message["role"] == "assistant":
            calls = [part for part in message["content"] if part["type"] == "toolCall"]
            back: Json = {
                "role": "assistant",
                "content": said([p for p in message["content"] if p not in calls], style),
            }
            if calls:
                back["tool_calls"] = [_call(part) for part in calls]
            yield Asked(before, said(message["content"], style), [part["id"] for part in calls], back)
            before = []
        elif message["role"] == "toolResult":
            before.append({"role": "tool", "tool_call_id": message["toolCallId"], "content": text})
        else:
            before.append({"role": "user", "content": text})


def _call(part: Json) -> Json:
    function = {"name": part["name"], "arguments": json.dumps(part["arguments"], ensure_ascii=False)}
    return {"id": part["id"], "type": "function", "function": function}


def tools_of(path: Path) -> list[Json]:
    """A definition of every tool that is called in a session; all arguments are strings or numbers."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text("utf-8").splitlines():
        for part in (json.loads(line).get("message") or {"content": []})["content"]:
            if part["type"] == "toolCall":
                kinds = {
                    key: "string" if isinstance(value, str) else "number" for key, value in part["arguments"].items()
                }
                found.setdefault(part["name"], {}).update(kinds)
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool {name}.",
                "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}},
            },
        }
        for name, kinds in sorted(found.items())
    ]


def tokenizer_for_oracle(folder: Path) -> Tokenizer:
    """A checkpoint's tokenizer with other ids: the oracle wants its special tokens first."""
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    names = [*SPECIAL, *(word for word in words if word not in SPECIAL)]
    data["model"]["vocab"] = {word: i for i, word in enumerate(names)}
    data["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


class _Lengths(DraftGate):
    """In place of the server's gate: drafts of three tokens, or 31 behind a match of 16, whatever they cost."""

    def choose(self, options: Sequence[DraftOption], *, carried: int, context: int) -> tuple[int, int]:
        return 0, min(options[0].most, drafted_behind(options[0].match))

    def hopeful(self, outlook: int, *, context: int) -> bool:
        return True


@dataclass(frozen=True)
class Pace:
    """Of an answer, on the virtual clock.

    Attributes:
        tokens: that it has.
        passes: that decoded it.
        seconds: from its first pass to its last, what the loop computes beside the passes included.
    """

    tokens: int
    passes: int
    seconds: float


@contextmanager
def serving(
    checkpoint: Path,
    work: Path,
    costs: dict[int, float] | None = None,
    *,
    fixed: bool = False,
    passes: str = "",
    clock: VirtualClock | None = None,
) -> Iterator[str]:
    """Our server in this process, on an oracle. Gives its URL; the next answer goes into ``reply.txt`` in `work`.

    Args:
        costs: published ones, that the gate goes by; ``None``: the gate goes by what it measures.
        fixed: drafts have fixed lengths, the gate decides nothing.
        passes: how long the oracle's passes take, see `ORACLE_PASS`.
        clock: on which they take it; ``None``: they sleep.
    """
    settings = {
        "model_path": str(checkpoint),
        "trust_remote_code": True,
        "start_llm_cache_dir": work,
        "log_root": work / "logs",
        "kv_disk_dir": "off",
        "mlx_port": 0,
        "proxy": "off",
        "reanchor": "off",
        "log_json": True,
        "default_temperature": 0.0,
        "max_kv_size": CONTEXT,
        "drafts": "auto",
    }
    app = App(load_settings(None, **settings), say=lambda line: None)
    environment = {"ORACLE_REPLIES": str(work / "reply.txt")} | ({"ORACLE_PASS": passes} if passes else {})
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        if clock is not None:
            stack.enter_context(clock.installed())
        if costs is not None:
            stack.enter_context(patch("start_llm.engine.decode.drafting.PassCosts", lambda: Published(costs)))
        if fixed:
            stack.enter_context(patch("start_llm.engine.decode.drafting.DraftGate", _Lengths))
        app.start()
        try:
            yield app.server_url
        finally:
            app.stop()


def replay(
    url: str,
    replies: Path,
    session: list[Asked],
    tools: list[Json],
    *,
    front: str = "",
    first: int = 0,
    limit: float = math.inf,
    tell: Callable[[int, Totals], None] = lambda *_: None,
) -> tuple[int, Totals]:
    """Sends a session's requests in their order. Counts what the server says that it did.

    Args:
        front: what the conversation begins with, however long.
        first: so many answers are sent as they were recorded, and not asked for.
        limit: seconds after which no more is asked for.
        tell: gets the number of answers that are there, and the counts so far.

    Returns:
        As `tell` gets it, at the end.

    Raises:
        AssertionError: the model did not say what was recorded, so its KV was wrong.
    """
    totals, ids = Totals(), dict[str, str]()
    messages: list[Json] = [{"role": "system", "content": front}] if front else []
    end, done = time.monotonic() + limit, 0
    with httpx.Client(timeout=WAIT) as client:
        for one in session:
            if time.monotonic() > end:
                break
            messages += [
                {**message, "tool_call_id": ids[message["tool_call_id"]]} if "tool_call_id" in message else message
                for message in one.before
            ]
            done += 1
            if done <= first:
                ids.update((call, call) for call in one.calls)
                messages.append(one.message)
                continue
            replies.write_text(one.answer, "utf-8")
            body = {"messages": messages, "tools": tools, "session_id": "recorded"}
            response = client.post(f"{url}/v1/chat/completions", json=body)
            response.raise_for_status()
            data = response.json()
            message, report = data["choices"][0]["message"], data["usage"]["start_llm"]
            calls = message.get("tool_calls") or []
            assert len(calls) == len(one.calls), f"{message} is not {one.answer!r}"
            ids.update({old: call["id"] for old, call in zip(one.calls, calls, strict=True)})
            messages.append(message)
            totals.said += report["generated"]
            totals.forwards += report["forwards"]
            totals.drafted += report["drafted"]
            totals.accepted += report["accepted"]
            tell(done, totals)
    return done, totals


def paced(url: str, work: Path, log: Path, front: str, answer: str, *, drafts: bool) -> Pace:
    """Asks for one answer, alone, behind a long system text.

    Args:
        work: folder of ``reply.txt``.
        log: the oracle's (`ORACLE_LOG`).
        drafts: whether the request may have them.
    """
    (work / "reply.txt").write_text(answer, "utf-8")
    began = oracle_log.mark(log)
    messages = [{"role": "system", "content": front}, {"role": "user", "content": f"go {drafts}"}]
    body = {"messages": messages, "drafts": drafts, "max_tokens": 100_000}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
    response.raise_for_status()
    assert response.json()["choices"][0]["message"]["content"] == answer, "the model did not say what it was told"
    decoded = [one for one in oracle_log.passes(log, began) if one.decoded]
    report = response.json()["usage"]["start_llm"]
    return Pace(report["generated"], len(decoded), decoded[-1].t - decoded[0].t)
