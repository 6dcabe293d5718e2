"""The real LiteLLM in front of a stub: every dialect arrives as what it was sent as, and comes back whole.

These tests fail when a LiteLLM update changes the way of a dialect; `start_llm/proxy/config.py` says what they rely on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from start_llm.core.settings import load_settings
from start_llm.proxy.launcher import LiteLLMProxy
from tests.proxy.stub import ARGUMENTS, HEADER, PATCH, REASONING, REPORT, TEXT, StubServer

MODELS = ["served", "gpt-5.5", "claude-opus-4-6", "openai/org/big"]
FUNCTION = {"name": "read", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", "strict": False} | FUNCTION
MESSAGES_TOOL = {"name": "read", "description": "d", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def back() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def proxy(back: StubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLLMProxy]:
    folder = tmp_path_factory.mktemp("proxy")
    settings = load_settings(
        None,
        proxy_port=0,
        start_llm_cache_dir=folder / "cache",
        api_key="server-key",
        model_path="org/big",
        sse_ping_seconds=0.5,
    )
    proxy = LiteLLMProxy(
        settings,
        server_url=back.url,
        model_id="served",
        log_path=folder / "proxy.log",
        env_file=folder / ".env",
    )
    proxy.start()
    try:
        assert proxy.wait_ready(90), proxy.log_tail()
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def chat(proxy: LiteLLMProxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=proxy.master_key, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(proxy: LiteLLMProxy) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=proxy.url, api_key=proxy.master_key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", MODELS)
def test_chat_completions(back: StubServer, chat: openai.OpenAI, model: str) -> None:
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":  1}'}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
    ]  # fmt: skip
    extra = {"top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": True}}
    raw = chat.chat.completions.with_raw_response.create(  # type: ignore[call-overload]
        model=model, messages=history, tools=[CHAT_TOOL], reasoning_effort="high", seed=1, extra_body=extra
    )
    answer = raw.parse()
    seen = back.seen[-1]
    assert seen.path == "/v1/chat/completions" and seen.headers["authorization"] == "Bearer server-key"
    assert seen.body["model"] == "served" and seen.body["tools"] == [CHAT_TOOL]
    assert seen.body["messages"] == [{k: v for k, v in m.items() if v is not None} for m in history]
    assert seen.body["reasoning_effort"] == "high" and seen.body["seed"] == 1
    assert {name: seen.body[name] for name in extra} == extra
    message = answer.choices[0].message
    assert message.content == TEXT and message.reasoning_content == REASONING
    assert message.tool_calls[0].function.arguments == ARGUMENTS and answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8 and answer.usage.start_llm == REPORT
    assert raw.headers["llm_provider-x-start-llm-cache"] == HEADER


def test_chat_completions_stream(back: StubServer, chat: openai.OpenAI) -> None:
    stream = chat.chat.completions.create(
        model="served",
        messages=[{"role": "user", "content": "hi"}],
        tools=[CHAT_TOOL],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert back.seen[-1].path == "/v1/chat/completions" and back.seen[-1].body["stream"] is True
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == REASONING
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls if call.function] == [("read", ARGUMENTS)]
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens == 12
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 8


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
@pytest.mark.parametrize("model", MODELS[:3])
def test_messages(back: StubServer, claude: anthropic.Anthropic, model: str, thinking: dict[str, object]) -> None:
    body = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "x"},
                {"type": "tool_use", "id": "toolu_9", "name": "read", "input": {"b": 1, "a": 2}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "o"}]},
            {"role": "system", "content": "inside"},
        ],
        "tools": [MESSAGES_TOOL],
        "thinking": thinking,
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
    }  # fmt: skip
    answer = claude.messages.create(model=model, max_tokens=2048, **body)  # type: ignore[call-overload]
    seen = back.seen[-1]
    assert seen.path == "/v1/messages" and seen.headers["authorization"] == "Bearer server-key"
    assert seen.body == body | {"model": "served", "max_tokens": 2048, "stream": False}
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[0].thinking == REASONING and answer.content[2].input == {"path": "a.txt"}
    assert answer.usage.cache_read_input_tokens == 8 and answer.usage.start_llm == REPORT


def test_messages_stream(back: StubServer, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="claude-opus-4-6",
        max_tokens=50,
        messages=[{"role": "user", "content": "hi"}],
        tools=[MESSAGES_TOOL],  # type: ignore[list-item]
    ) as stream:
        message = stream.get_final_message()
    assert back.seen[-1].path == "/v1/messages" and back.seen[-1].body["stream"] is True
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use" and message.usage.cache_read_input_tokens == 8


@pytest.mark.parametrize("model", MODELS[:3])
def test_responses(back: StubServer, chat: openai.OpenAI, model: str) -> None:
    body = {
        "instructions": "i",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"a":  1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "o"},
        ],
        "tools": [RESPONSES_TOOL],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content"],
    }
    answer = chat.responses.create(model=model, **body)  # type: ignore[call-overload]
    assert back.seen[-1].path == "/v1/responses" and back.seen[-1].body == body | {"model": "served"}
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == TEXT and answer.output[2].arguments == ARGUMENTS
    assert answer.usage.input_tokens_details.cached_tokens == 8
    chat.responses.create(model=model, input="more", previous_response_id=answer.id)
    assert back.seen[-1].body["previous_response_id"] == "resp_1"


CODEX_TOOLS = [
    {"type": "namespace", "name": "agents", "description": "d", "tools": [RESPONSES_TOOL]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
]
CODEX_CALLS = [("function_call", "agents", "read", ARGUMENTS), ("custom_tool_call", None, "patch", PATCH)]


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "served"])
def test_tokens_are_counted_by_the_server(back: StubServer, claude: anthropic.Anthropic, model: str) -> None:
    tool: Any = {"name": "read", "input_schema": {"type": "object"}}
    ask: Any = [{"role": "user", "content": "Count."}]
    counted = claude.messages.count_tokens(model=model, messages=ask, tools=[tool], system="Be.")
    assert counted.to_dict() == {"input_tokens": 12}
    seen = back.seen[-1]
    assert seen.path.endswith("/v1/messages/count_tokens") and seen.headers["x-api-key"] == "server-key"
    assert seen.body == {"model": "served", "messages": ask, "tools": [tool], "system": "Be."}


def test_input_tokens_of_responses_are_counted_by_the_server(back: StubServer, chat: openai.OpenAI) -> None:
    assert chat.responses.input_tokens.count(model="gpt-5.5", input="Count.").input_tokens == 12
    assert back.seen[-1].body == {"model": "served", "input": "Count."}


def test_a_count_needs_the_key_and_a_model(back: StubServer, proxy: LiteLLMProxy) -> None:
    url = f"{proxy.url}/v1/messages/count_tokens"
    asked = len(back.seen)
    assert httpx.post(url, json={"model": "stub"}, headers={"x-api-key": "sk-wrong"}).status_code in (400, 401)
    assert len(back.seen) == asked
    # What is wrong with a request, the server says.
    httpx.post(url, json={"model": "unknown"}, headers={"x-api-key": proxy.master_key})
    assert back.seen[-1].body == {"model": "unknown"}


def test_responses_namespaces_and_custom_tools(back: StubServer, chat: openai.OpenAI) -> None:
    history = [
        {"role": "user", "content": "u"},
        {"type": "function_call", "namespace": "agents", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "o"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "o"},
        {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": [
            {"type": "encrypted_content", "encrypted_content": "Look."}
        ]},
    ]  # fmt: skip
    body = {"input": history, "tools": CODEX_TOOLS}

    def calls(output: Any) -> list[Any]:
        items = [item for item in output if item.type.endswith("_call")]
        return [(i.type, i.namespace, i.name, i.input if i.type == "custom_tool_call" else i.arguments) for i in items]

    answer = chat.responses.create(model="served", **body)  # type: ignore[call-overload]
    assert back.seen[-1].body == body | {"model": "served"}
    assert calls(answer.output) == CODEX_CALLS
    events = list(chat.responses.create(model="served", stream=True, **body))  # type: ignore[call-overload]
    assert back.seen[-1].body == body | {"model": "served", "stream": True}
    assert calls(event.item for event in events if event.type == "response.output_item.done") == CODEX_CALLS
    assert calls(events[-1].response.output) == CODEX_CALLS
    assert "response.custom_tool_call_input.delta" in [event.type for event in events]


def test_responses_stream(back: StubServer, chat: openai.OpenAI) -> None:
    events = list(chat.responses.create(model="served", input="hi", tools=[RESPONSES_TOOL], stream=True))  # type: ignore[call-overload]
    assert back.seen[-1].path == "/v1/responses" and back.seen[-1].body["stream"] is True
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.reasoning_summary_text.delta" in kinds and "response.function_call_arguments.delta" in kinds
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.input_tokens_details.cached_tokens == 8


def test_the_served_names_are_listed_and_a_key_is_needed(proxy: LiteLLMProxy, chat: openai.OpenAI) -> None:
    assert [model.id for model in chat.models.list()][:2] == ["served", "openai/org/big"]
    stranger = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(openai.APIStatusError) as refused:
        stranger.models.list()
    assert refused.value.status_code in {400, 401}


WAITING = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    "responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", WAITING)
def test_a_stream_that_waits_shows_life(back: StubServer, proxy: LiteLLMProxy, path: str) -> None:
    """LiteLLM drops the server's own comments, so it must write some itself."""
    body = {"model": "served", "stream": True} | WAITING[path]
    headers = {"Authorization": f"Bearer {proxy.master_key}"}
    back.go.clear()
    try:
        with httpx.stream("POST", f"{proxy.url}/v1/{path}", json=body, headers=headers, timeout=30) as stream:
            lines = stream.iter_lines()
            assert any(line.startswith(": ping") or line == "event: ping" for line in lines)
            back.go.set()
            assert TEXT in "".join(lines)
    finally:
        back.go.set()
