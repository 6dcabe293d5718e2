"""Chat completions with the official client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from start_llm.api.server import ApiServer
from start_llm.core.errors import QueueFull
from start_llm.core.events import ChoiceDone, Failed, TextDelta, TokenLogprob
from tests.api.fakes import DONE, FIRST, USER, FakeService, answer
from tests.vendors import openai


def test_plain_answer(client: openai.OpenAI, service: FakeService) -> None:
    """How calls and reasoning are answered, and what is streamed: `tests/api/test_writers.py`."""
    reply = client.chat.completions.with_raw_response.create(model="gpt-x", messages=USER, user="u1")
    assert reply.headers["x-start-llm-cache"] == "prompt=120; reused=100; computed=20; new=16; miss=diverged"
    completion = reply.parse()
    assert completion.choices[0].message.content == "Hello there."
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == "gpt-x"
    assert completion.usage.prompt_tokens_details.cached_tokens == 100
    assert completion.usage.completion_tokens_details.reasoning_tokens == 1
    assert completion.usage.start_llm["miss"]["reason"] == "diverged"
    named = client.chat.completions.create(model="default", messages=USER)
    assert named.model == "tiny" and service.requests[1].model == "tiny"  # what answers, not what it was called
    request = service.requests[0]
    assert request.session is None
    assert request.sampling.temperature == 0.1
    assert request.sampling.repetition_penalty == 1.0
    assert request.max_tokens is None


def test_logprobs_and_choices(client: openai.OpenAI, service: FakeService) -> None:
    logprob = TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.0)))
    service.script = lambda request: [
        FIRST,
        TextDelta("b", 1),
        TextDelta("a", 0, (logprob,)),
        ChoiceDone("length", 1),
        ChoiceDone("stop", 0),
        DONE,
    ]
    completion = client.chat.completions.create(model="m", messages=USER, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in completion.choices] == ["a", "b"]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "length"]
    entry = completion.choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.top_logprobs[1].token) == ("<7>", -0.5, "<8>")
    assert service.requests[0].logprobs == 2


def _asks_for_nothing(field: str) -> tuple[Any, ...]:
    if field == "response_format":
        return (None, {"type": "text"})
    return (None, False) if field == "web_search_options" else (None, False, "", [], {})


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        ("chat/completions", "guided_json", {"type": "object"}),
        ("chat/completions", "guided_choice", ["a"]),
        ("chat/completions", "grammar", "root ::= x"),
        ("chat/completions", "stop_token_ids", [1]),
        ("chat/completions", "web_search_options", {}),
        ("chat/completions", "regex", "[a-z]+"),
        ("chat/completions", "ebnf", "root ::= x"),
        ("chat/completions", "xtc_probability", 0.5),
        ("completions", "dry_multiplier", 0.8),
        ("messages", "typical_p", 0.9),
        ("responses", "mirostat", 2),
        ("completions", "structured_outputs", {"choice": ["a"]}),
        ("completions", "response_format", {"type": "json_object"}),
        ("messages", "mcp_servers", [{"type": "url", "url": "http://x", "name": "x"}]),
        ("messages", "container", {"skills": []}),
        ("responses", "prompt", {"id": "p"}),
        ("responses", "background", True),
        ("responses", "conversation", "c"),
    ],
)
def test_a_field_that_would_change_the_answer_is_not_passed_over(
    server: ApiServer, service: FakeService, route: str, field: str, value: Any
) -> None:
    body = {"model": "m", "messages": USER, "prompt": "p", "max_tokens": 5}
    body = {"model": "m", "input": "p"} if route == "responses" else body
    refused = httpx.post(f"{server.url}/v1/{route}", json=body | {field: value})
    assert refused.status_code == 501 and refused.headers["x-should-retry"] == "false", "an SDK would send it again"
    assert refused.json()["error"]["message"].startswith(f"{field}: ") and not service.requests
    for nothing in _asks_for_nothing(field):
        assert httpx.post(f"{server.url}/v1/{route}", json=body | {field: nothing}).status_code == 200


def test_errors_before_and_inside_a_stream(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: [Failed(QueueFull("full", retry_after=3.2))]
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="m", messages=USER, stream=True)
    assert caught.value.response.headers["retry-after"] == "4"
    assert caught.value.body["code"] == "queue_full"
    service.script = lambda request: [FIRST, TextDelta("a"), Failed(QueueFull("full", retry_after=3))]
    with pytest.raises(openai.APIError, match="full"):
        list(client.chat.completions.create(model="m", messages=USER, stream=True))


def test_a_broken_stream_is_told(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: [FIRST, TextDelta("a")]
    with pytest.raises(openai.APIError, match="before it was complete"):
        list(client.chat.completions.create(model="m", messages=USER, stream=True))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="m", messages=USER)
    service.script = lambda request: []
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="m", messages=USER, stream=True)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("claude-anything").id == "claude-anything"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("other")


def test_completion_logprobs(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: answer(TextDelta("a", 0, (TokenLogprob(7, -0.5, ((8, -1.0),)),)))
    logprobs = client.completions.create(model="m", prompt="p", logprobs=1).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs) == (["<7>"], [-0.5], [{"<8>": -1.0}])


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("suffix", {"suffix": "x"}),
        ("echo", {"echo": True}),
        ("best_of", {"best_of": 3}),
        ("prompt", {"prompt": []}),
        ("prompt[1]", {"prompt": ["a", []]}),
        ("prompt[2]", {"prompt": [[5], [6], [-1]]}),
        ("prompt", {"prompt": ["a"] * 33, "n": 2}),
    ],
)
def test_bad_fields_of_completions_are_named(client: openai.OpenAI, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": "m", "prompt": "a"} | more)
    assert caught.value.body["param"] == field


@pytest.mark.parametrize("prompt", ["a", ["a"], [5, 6], [[5, 6]]])
def test_a_list_of_one_prompt_is_that_prompt(client: openai.OpenAI, service: FakeService, prompt: Any) -> None:
    client.completions.create(model="m", prompt=prompt, n=2)
    (asked,) = service.requests
    assert asked.prompt in ("a", (5, 6)) and asked.n == 2
