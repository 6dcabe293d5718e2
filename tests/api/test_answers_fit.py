"""Answers of every dialect, whole and as streams, fit the schemas that `/openapi.json` publishes.

What the model says, how a request ends and what the client asks for are drawn from a seed. Each answer must hold every
field that its schema requires and none that the schema does not know; its headers must be described, too.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from start_llm.core.errors import Internal, OutOfMemory, QueueFull, StartLLMError, TimedOut, Unavailable
from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    Failed,
    FirstToken,
    Progress,
    ReasoningDelta,
    Searched,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
)
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest
from tests.api.conftest import Serve
from tests.api.fakes import USER, FakeService
from tests.api.media.test_audio import FakeAudio
from tests.api.media.test_embeddings import FakeEncoders
from tests.fuzz.requests import BODIES, FORMS
from tests.fuzz.tape import Tape

TEXTS = ("", "word", "ein Wort, ä ✓ 漢", '"quoted" \\ \n', "```code```", "x" * 300)
ARGUMENTS = ('{"path": "a"}', "{}", "", '{"path": ', "[1]", '"text"', '{"n": 1e400}')
#: Of HTTP itself, not of this API.
PLAIN_HEADERS = {"content-type", "content-length", "date", "connection", "cache-control", "x-accel-buffering"}
GETS = ("/v1/models", "/v1/models/tiny", "/health", "/v1/loads", "/v1/cache/requests", "/v1/cache/requests/known")
GETS += ("/api/v0/models", "/api/v0/models/tiny", "/api/v0/models/none", "/props", "/slots")
GETS += ("/api/tags", "/api/ps", "/api/version", "/openapi.json", "/v1/models/none", "/v1/cache/requests/none")


class Answers:
    """The published document, with every object closed: a field that it does not name does not fit."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        for name, schema in document["components"]["schemas"].items():
            if not name.endswith("Body"):
                _close(schema)
        whole: Any = Resource(contents=document, specification=DRAFT202012)
        self._registry = Registry().with_resource("urn:api", whole)
        self._validators: dict[str, Any] = {}

    def faults(self, path: str, method: str, response: httpx.Response) -> list[str]:
        """What does not fit; empty if all does."""
        operation = self.document["paths"][path][method]
        said = operation["responses"].get(str(response.status_code))
        if said is not None and "$ref" in said:
            said = self.document["components"]["responses"][said["$ref"].rpartition("/")[2]]
        if said is None:
            return [f"status {response.status_code} is not described"]
        media = response.headers.get("content-type", "").partition(";")[0]
        known = {name.lower() for name in said.get("headers", {})} | PLAIN_HEADERS
        faults = [f"header {name} is not described" for name in response.headers if name not in known]
        content = next((said["content"][kind] for kind in said["content"] if _is_a(media, kind)), None)
        if content is None:
            return [*faults, f"{media} is not described"]
        if "x-itemSchema" in content:
            return faults + [fault for item in _items(response.text, media) for fault in self._check(content, item)]
        if "json" in media:
            faults += self._check(content, response.json())
        return faults

    def _check(self, content: dict[str, Any], value: Any) -> list[str]:
        schema = content.get("x-itemSchema", content["schema"])
        key = json.dumps(schema)
        if key not in self._validators:
            moved = json.loads(key.replace('"#/', '"urn:api#/'))
            self._validators[key] = Draft202012Validator(moved, registry=self._registry)
        return [f"{error.json_path}: {error.message[:300]}" for error in self._validators[key].iter_errors(value)]


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)


def _is_a(media: str, kind: str) -> bool:
    return media == kind or (kind.endswith("/*") and media.startswith(kind[:-1]))


def _items(text: str, media: str) -> Iterator[Any]:
    """What the events of a stream hold, or its lines."""
    for line in text.splitlines() if media == "application/x-ndjson" else text.split("\n"):
        data = line if media == "application/x-ndjson" else line.removeprefix("data: ")
        if data and (data is not line or media == "application/x-ndjson") and data != "[DONE]":
            yield json.loads(data)


# --- what the model says ---


def told(chance: random.Random) -> CacheReport:
    counts = {name: chance.randrange(5000) for name in ("prompt", "reused", "computed", "new", "joined", "generated")}
    miss = Miss("diverged", 7, "a", "b", chance.choice([None, 3]), "content", None, "It differs.", "send session_id")
    words = {"session": chance.choice(["", "s1"]), "cut": chance.choice(["", "watchdog"])}
    return CacheReport(**counts, **words, seconds_queued=chance.random(), miss=chance.choice([None, miss]))


def said(chance: random.Random, request: ChatRequest, choice: int) -> Iterator[Event]:
    logprobs: tuple[TokenLogprob, ...] = ()
    if request.logprobs is not None:
        top = tuple((token, -1.5) for token in range(request.logprobs))
        logprobs = (TokenLogprob(5, -0.5, top, text="w" if request.prompt is not None else None),)
    raw = request.prompt is not None
    for _ in range(0 if raw else chance.randrange(3)):
        yield ReasoningDelta(chance.choice(TEXTS), choice)
    for _ in range(chance.randrange(4)):
        yield TextDelta(chance.choice(TEXTS), choice, logprobs)
    calls = chance.randrange(3) if request.tools and not raw else 0
    for index in range(calls):
        call_id, name, arguments = f"call_{index}", request.tools[0].name, chance.choice(ARGUMENTS)
        yield ToolCallStarted(index, call_id, name, choice)
        for piece in (arguments[:3], arguments[3:]):
            yield ToolCallDelta(index, piece, choice)
        yield ToolCallFinished(index, call_id, name, arguments, choice)
    if request.search is not None and calls:
        result = (call_id, *chance.choice([(("read",), ""), ((), ""), ((), "`query` must be a string.")]))
        yield Searched((result,), choice)
        yield TextDelta(chance.choice(TEXTS), choice)
    reason = "tool_calls" if calls else chance.choice(["stop", "length", "cancelled"])
    stop = chance.choice([None, request.stop[0]]) if request.stop and not calls else None
    yield ChoiceDone(reason, choice, stop)  # type: ignore[arg-type]


FAILURES: tuple[Callable[[], StartLLMError], ...] = (
    lambda: Internal("It broke."),
    lambda: TimedOut("It took too long."),
    lambda: OutOfMemory("It does not fit."),
    lambda: QueueFull("Too many wait.", retry_after=2),
    lambda: Unavailable("The model is not loaded."),
)


def script(chance: random.Random) -> Callable[[ChatRequest], Iterator[Event]]:
    def answer(request: ChatRequest) -> Iterator[Event]:
        if chance.random() < 0.05:
            raise chance.choice(FAILURES)()
        return events(request)

    def events(request: ChatRequest) -> Iterator[Event]:
        if chance.random() < 0.2:
            yield Progress(0, 0)
        yield Started(told(chance))
        yield Progress(5, 10)
        yield FirstToken()
        for choice in range(request.n * (1 + len(request.more_prompts))):
            yield from said(chance, request, choice)
            if chance.random() < 0.08:
                yield Failed(chance.choice(FAILURES)())
                return
        counts = [chance.randrange(5000) for _ in range(4)]
        yield Done(Usage(*counts), told(chance))

    return answer


# --- what clients ask ---

NESTED = {"type": "function", "function": {"name": "read"}}
FLAT = {"type": "function", "name": "read"}
CLAUDES = {"name": "read", "input_schema": {}}
LATER = {"defer_loading": True}
USAGE = {"stream_options": {"include_usage": True}}
SEALED = {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}
TALK = {"messages": USER, "max_tokens": 100}
# Path, body, and fields that are there half of the time. Random bodies are answered more seldom, and about more.
ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", TALK, {"tools": [NESTED], "n": 2, "stop": ["END"], "logprobs": True} | USAGE),
    ("/v1/completions", {"prompt": "Hi"}, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "stop": "E"} | USAGE),
    ("/v1/messages", TALK, {"tools": [CLAUDES], "stop_sequences": ["END"], "thinking": {"type": "adaptive"}}),
    ("/v1/messages", TALK, {"tools": [{"type": "tool_search_tool_bm25", "name": "search"}, CLAUDES | LATER]}),
    ("/v1/responses", {"input": "Hi"}, {"tools": [FLAT], "reasoning": {"summary": "auto"}, "store": False} | SEALED),
    ("/v1/responses", {"input": "Hi"}, {"tools": [{"type": "custom", "name": "read"}, {"type": "web_search"}]}),
    ("/v1/responses", {"input": "Hi"}, {"tools": [{"type": "tool_search"}, FLAT | LATER]}),
    ("/v1/responses", {"input": "Hi"}, {"tools": [{"type": "tool_search", "execution": "client"}, FLAT]}),
    ("/api/chat", TALK, {"tools": [NESTED], "think": True, "options": {"stop": ["E"]}, "logprobs": True}),
    ("/api/generate", {"prompt": "Hi"}, {"think": True, "raw": True, "system": "Be short.", "logprobs": True}),
]
RANDOM = [path for path in BODIES if path.startswith(("/v1/", "/api/")) and path not in FORMS]


def asked(chance: random.Random) -> tuple[str, Any]:
    if chance.random() < 0.4:
        path = chance.choice(RANDOM)
        return path, BODIES[path](Tape(chance.randbytes(350)))
    path, body, fields = chance.choice(ASKED)
    more = {name: value for name, value in fields.items() if chance.random() < 0.5}
    return path, body | {"stream": chance.choice([True, False])} | more


class World:
    """A server around a scripted model, and its client."""

    def __init__(self, serve: Serve, service: FakeService, seed: int) -> None:
        self.chance = random.Random(seed)
        self.service, self.encoders = service, FakeEncoders()
        service.script = script(self.chance)
        url = serve({"encoders": self.encoders, "audio": FakeAudio()}).url
        self.client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.answers = Answers(self.client.get("/openapi.json").json())
        self.statuses: Counter[tuple[str, int]] = Counter()

    def ask(self) -> list[str]:
        """One request, and what does not fit in its answer."""
        chance = self.chance
        kind = chance.random()
        self.encoders.cut = chance.choice([0, 1])
        if kind < 0.05:
            return self._fits("get", chance.choice(GETS))
        if kind < 0.08:
            form = {"response_format": chance.choice(["json", "verbose_json", "text", "srt", "odd"])}
            return self._fits("post", "/v1/audio/transcriptions", data=form, files={"file": b"RIFF"})
        path, body = asked(chance)
        sent = {"content": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}
        faults = self._fits("post", path, **sent)
        if path == "/v1/responses" and not faults and chance.random() < 0.2 and self.service.requests:
            made = self.service.requests[-1].id
            for method, place in (("get", ""), ("get", "/input_items"), ("delete", "")):
                faults += self._fits(method, f"/v1/responses/{made}{place}")
        return faults

    def _fits(self, method: str, path: str, **given: Any) -> list[str]:
        found = self.client.request(method, path, **given)
        parts = path.split("/")
        if path.startswith(("/v1/models/", "/v1/cache/requests/", "/api/v0/models/")) and method == "get":
            parts[-1] = "{id}"
        elif path.startswith("/v1/responses/") and "input_tokens" not in path:
            parts[3] = "{id}"
        name = "/".join(parts)
        self.statuses[name, found.status_code] += 1
        return [
            f"{method} {path} {given.get('content')}: {fault}" for fault in self.answers.faults(name, method, found)
        ]


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_answers_fit_their_schemas(serve: Serve, service: FakeService, count: int) -> None:
    world = World(serve, service, 24)
    faults = [fault for _ in range(count) for fault in world.ask()]
    assert faults == [], f"{len(faults)} do not fit\n" + "\n".join(faults[:20])
    assert len(world.statuses) > 15 and {200, 400} <= {status for _, status in world.statuses}


def test_a_field_that_is_missing_or_unknown_does_not_fit(serve: Serve, service: FakeService) -> None:
    world = World(serve, service, 1)
    good = world.client.get("/v1/models")
    assert world.answers.faults("/v1/models", "get", good) == []
    body = good.json()
    for wrong in (body | {"more": 1}, {"object": "list"}, body | {"data": [body["data"][0] | {"created": "x"}]}):
        sent = httpx.Response(200, json=wrong, headers={"x-odd": "1"})
        faults = world.answers.faults("/v1/models", "get", sent)
        assert "header x-odd is not described" in faults and len(faults) > 1
    assert world.answers.faults("/v1/models", "get", httpx.Response(418)) == ["status 418 is not described"]
