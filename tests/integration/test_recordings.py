"""What agents send when their context is full, recorded (`tests/e2e/recordings`) and sent again: a summary, the turn
behind it, a plan. A recording has lengths in place of words; a result in it is made as long as the history is to be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from scripts.bench.replay import CallIds, Optimum, raw_reply
from start_llm.engine.thread import EngineThread
from tests.integration.live import Live, live
from tests.integration.test_reanchoring import settled
from tests.model_thread import on_model_thread
from tests.oracle.build import CONTEXT

Json = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "e2e" / "recordings"
WITH_MESSAGES = ["claude", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("codex", "qwen", "cn"))]
FLATTENED = ["opencode", pytest.param("kilo", marks=pytest.mark.thorough)]
SIZES = [
    ("plain", 16_000),
    pytest.param("hybrid", 64_000, marks=pytest.mark.thorough),
    *(pytest.param(kind, length, marks=pytest.mark.slow) for kind, length in [
        ("hybrid", 16_000), ("plain", 64_000), ("plain", 200_000), ("hybrid", 200_000)
    ]),
]  # fmt: skip


COMMON = ("the", "file", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")


def words(seed: str, length: int) -> str:
    """So many characters of common words, the same ones for the same seed."""
    drawn = hashlib.shake_128(seed.encode()).digest(length // 2 + 1)
    text = (f"{seed[-8:]} " + " ".join(COMMON[byte % len(COMMON)] for byte in drawn))[:length]
    return f"{text[:-1]}x" if text.endswith(" ") else text


@dataclass
class Recording:
    """The requests of one agent, as bodies of chat completions, with what was answered.

    `padded`: how long the longest line of the first result is, of those that come in no other one.
    """

    data: Json
    padded: int

    @classmethod
    def of(cls, name: str, padded: int) -> Recording:
        return cls(json.loads((FOLDER / f"{name}.json").read_text("utf-8")), padded)

    def __post_init__(self) -> None:
        new = chain.from_iterable(request["new"] for request in self.data["requests"])
        first, *others = (one for one in new if one["role"] == "tool")
        known = set(chain.from_iterable(self._numbers(one) for one in others if one["text"] != first["text"]))
        self._long = max((n for n in self._numbers(first) if n not in known), key=self._length)

    def _numbers(self, message: Json) -> Iterator[int]:
        for item in message["text"]:
            if isinstance(item, str):
                first, last = map(int, item.split("-"))
                yield from range(first, last + 1)
            else:
                yield from item if isinstance(item, list) else [item]

    def _length(self, number: int) -> int:
        piece = self.data["pieces"][number]
        return int(piece if isinstance(piece, int) else piece[1])

    def _piece(self, number: int) -> str:
        piece = self.data["pieces"][number]
        if number == self._long:
            return words(f"long {self.data['client']}", self.padded)
        if isinstance(piece, int):
            return words(str(number), piece)
        head, length = piece
        return f"{head} {words(str(number), length)}"[:length]

    def text(self, items: list[Any]) -> str:
        lines: list[str] = []
        for item in items:
            if isinstance(item, str):
                first, last = map(int, item.split("-"))
                lines += map(self._piece, range(first, last + 1))
            else:
                lines.append("".join(map(self._piece, item if isinstance(item, list) else [item])))
        return "\n".join(lines)

    def _message(self, one: Json) -> Json:
        message = {"role": one["role"], "content": self.text(one["text"])}
        if "thoughts" in one:
            message["reasoning_content"] = self.text(one["thoughts"])
        if "calls" in one:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {name: call[name] for name in ("name", "arguments")}}
                for call in self._calls(one)
            ]
        return message | ({"tool_call_id": f"call_r{one['of']}"} if "of" in one else {})

    def _calls(self, one: Json) -> list[Json]:
        return [
            {"id": f"call_r{number}", "name": name, "arguments": json.dumps({"input": self.text(items)})}
            for number, name, items in one.get("calls", ())
        ]

    def requests(self) -> Iterator[tuple[str, Json, Json]]:
        """(what it is, body, what was answered)."""
        messages: list[Json] = []
        tools: list[Json] = []
        for number, request in enumerate(self.data["requests"]):
            messages = messages[: request["keep"]] + [self._message(one) for one in request["new"]]
            if "tools" in request:
                tools = [self._tool(*tool) for tool in request["tools"]]
            said = request.get("reply")
            reply = {"text": words(f"said {number}", 90), "calls": []}
            if said is not None:
                reply = {"text": self.text(said["text"]), "calls": self._calls(said)}
                reply["reasoning"] = self.text(said["thoughts"]) if "thoughts" in said else ""
            yield request["what"], {"messages": messages} | ({"tools": tools} if tools else {}), reply

    def _tool(self, name: str, described: int, schema: int) -> Json:
        field = {"type": "string", "description": words(f"{name} fields", max(0, schema - 80))}
        parameters = {"type": "object", "properties": {"input": field}}
        function = {"name": name, "description": words(name, described), "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Row:
    what: str
    prompt: int
    computed: int
    new: int
    plain: int  # what a plain prefix cache would compute of a plain rendering
    reason: str


CALL = '<tool_call>\n{"name": "read_file", "arguments": {"input": "x"}}\n</tool_call>'


def decoded(tokens: list[int], model: Any, tokenizer: Any) -> str:
    return str(tokenizer.decode(tokens))


def check_what_is_seen(server: Live, shown: str, body: Json, replies: Path) -> None:
    """A summary is asked for: the oracle sees every line that was sent, what holds now last, and cannot call a tool."""
    system, *history = body["messages"]
    missing = [line for one in body["messages"] for line in (one["content"] or "").split("\n") if line not in shown]
    assert missing == []
    behind = shown[shown.rindex("<|im_end|>", 0, shown.rindex("<|im_start|>user")) :]
    told = "The system text at the top no longer holds" in behind
    assert told is (system["content"].split("\n")[0] not in shown[: shown.index("<|im_end|>")])
    assert not told or behind.index(system["content"]) < behind.index(history[-1]["content"])
    if "tools" in body:
        return
    assert "No tool can be called now: answer with text." in behind
    replies.write_text(CALL, "utf-8")
    message = server.chat(**body)["message"]
    assert not message.get("tool_calls") and "<tool_call>" not in str(message["content"]), message


def replay(
    server: Live, checkpoint: Path, recording: Recording, replies: Path, gap: Callable[[], object]
) -> Iterator[Row]:
    """`gap`: what is done while the client writes its next request."""
    optimum, ids = Optimum(checkpoint), CallIds()
    for what, recorded, reply in recording.requests():
        body = ids.put_into(recorded)
        replies.write_text(raw_reply(reply), "utf-8")
        _, plain, _ = optimum.of(body, raw_reply(reply))
        told = server.post("/v1/cache/explain", json={"model": "default", **body}).json()
        gap()
        before = server.passes()
        answer = server.chat(**body)
        report, message = answer["report"], answer["message"]
        made = message.get("tool_calls") or []
        for said, call in zip(reply["calls"], made, strict=True):
            assert call["function"]["name"] == said["name"]
            ids._now[said["id"].removeprefix("call_")] = call["id"]
        computed = server.prompt_work(report["prompt"], before)
        reason = (report.get("miss") or {}).get("reason", "")
        assert (told.get("miss") or {}).get("reason", "") == reason, (what, told, report)
        if what == "compaction":
            tokens = list(server.prompt_of(answer))
            check_what_is_seen(server, on_model_thread(server.app, partial(decoded, tokens)), body, replies)
        yield Row(what, report["prompt"], computed, report["new"], plain, reason)


@pytest.fixture
def rows(
    oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str, int], list[Row]]:
    def replayed(name: str, kind: str, length: int) -> list[Row]:
        monkeypatch.setenv("ORACLE_REPLIES", str(tmp_path / "reply"))
        held: list[partial[None]] = []
        prefill_idle = EngineThread.prefill_idle

        def hold(*args: Any, **more: Any) -> None:
            held.append(partial(prefill_idle, *args, **more))

        with (
            patch.object(EngineThread, "prefill_idle", hold),
            live(oracle_path(kind), tmp_path, reanchor="on", max_kv_size=CONTEXT) as server,
        ):

            def gap() -> None:
                """Guesses are computed before a request, so that its own work can be counted."""
                settled(server)
                while held:
                    held.pop(0)()
                    settled(server)

            recording = Recording.of(name, 4 * length)
            return list(replay(server, oracle_path(kind), recording, tmp_path / "reply", gap))

    return replayed


@pytest.mark.parametrize(("kind", "length"), SIZES)
@pytest.mark.parametrize("name", WITH_MESSAGES)
@pytest.mark.timeout(1200)
def test_a_summary_costs_what_is_new(
    rows: Callable[[str, str, int], list[Row]], name: str, kind: str, length: int
) -> None:
    for row in rows(name, kind, length):
        print(row)
        if row.what == "compaction":
            assert row.prompt >= 0.9 * length and row.computed <= 1.05 * row.new, row
        assert row.what != "behind" or row.computed <= 1.05 * row.new + 8, row
        # What a client keeps word for word behind a summary is in another place.
        assert row.computed <= 1.05 * max(row.new, row.plain) + 32, row
        # Continue and Qwen Code tell git's state in front of their tools: it is as it was before the summary.
        assert row.what != "behind" or row.computed <= 1.05 * row.plain + 8, row


@pytest.mark.parametrize("name", FLATTENED)
@pytest.mark.thorough
def test_a_conversation_in_one_message_is_named(rows: Callable[[str, str, int], list[Row]], name: str) -> None:
    found = rows(name, "plain", 4000)
    for row in found:
        print(row)
    assert next(row.reason for row in found if row.what == "flattened") == "flattened"
