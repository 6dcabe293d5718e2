"""The real LiteLLM in front of a stub: every dialect arrives as what it was sent as, and comes back whole.

These tests fail when a LiteLLM update changes the way of a dialect; `start_llm/proxy/config.py` says what they rely on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from start_llm.core.modelmap import PROXIED
from start_llm.core.settings import load_settings
from start_llm.proxy.launcher import LiteLLMProxy
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.real_proxy import running
from tests.proxy.stub import ARGUMENTS, CARD, HEADER, PATCH, REASONING, REPORT, TEXT, UNKNOWN
from tests.vendors import anthropic, openai

pytestmark = pytest.mark.timeout(400)

MODELS = ["served", "gpt-5.5", "claude-haiku-4-5", "pulled-later", "openai/org/big", "default"]
FUNCTION = {"name": "read", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", "strict": False} | FUNCTION
MESSAGES_TOOL = {"name": "read", "description": "d", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def back() -> Iterator[NodeStub]:
    with nodes(1) as [stub]:
        yield stub


@pytest.fixture(scope="module")
def proxy(back: NodeStub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLLMProxy]:
    folder = tmp_path_factory.mktemp("proxy")
    given = {"start_llm_cache_dir": folder / "cache", "api_key": "server-key", "model_path": "org/big"}
    settings = load_settings(None, proxy_port=0, sse_ping_seconds=0.5, **given)
    with running(settings, back.url, folder, "served") as proxy:
        yield proxy


def asked(model: str) -> str:
    """The name that the server is asked for: whatever has no entry of its own comes as the client sent it."""
    return "served" if model in {"served", "openai/org/big", "default"} else f"{PROXIED}{model}"


@pytest.fixture
def chat(proxy: LiteLLMProxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=proxy.master_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def web(proxy: LiteLLMProxy) -> Iterator[httpx.Client]:
    """One client: each new one reads the system's certificates."""
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        yield client


@pytest.fixture
def claude(proxy: LiteLLMProxy) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=proxy.url, api_key=proxy.master_key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", MODELS)
def test_chat_completions(back: NodeStub, chat: openai.OpenAI, model: str) -> None:
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
    assert seen.path == "chat/completions" and seen.headers["authorization"] == "Bearer server-key"
    assert seen.body["model"] == asked(model) and seen.body["tools"] == [CHAT_TOOL]
    assert seen.body["messages"] == [{k: v for k, v in m.items() if v is not None} for m in history]
    assert seen.body["reasoning_effort"] == "high" and seen.body["seed"] == 1
    assert {name: seen.body[name] for name in extra} == extra
    message = answer.choices[0].message
    assert message.content == TEXT and message.reasoning_content == REASONING
    assert message.tool_calls[0].function.arguments == ARGUMENTS and answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8 and answer.usage.start_llm == REPORT
    assert raw.headers["llm_provider-x-start-llm-cache"] == HEADER

    usage = {"include_usage": True}
    stream = chat.chat.completions.create(  # type: ignore[call-overload]
        model=model, messages=history, tools=[CHAT_TOOL], stream=True, stream_options=usage
    )
    chunks = list(stream)
    assert back.seen[-1].path == "chat/completions" and back.seen[-1].body["stream"] is True
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == REASONING
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls if call.function] == [("read", ARGUMENTS)]
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.prompt_tokens_details.cached_tokens) == (12, 8)


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
@pytest.mark.parametrize("model", MODELS[:4])
def test_messages(back: NodeStub, claude: anthropic.Anthropic, model: str, thinking: dict[str, object]) -> None:
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
    assert answer.usage.start_llm == REPORT
    with claude.messages.stream(model=model, max_tokens=2048, **body) as stream:  # type: ignore[call-overload]
        streamed = stream.get_final_message()
    for seen, is_stream in zip(back.seen[-2:], (False, True), strict=True):
        assert seen.path == "messages" and seen.headers["authorization"] == "Bearer server-key"
        assert seen.body == body | {"model": asked(model), "max_tokens": 2048, "stream": is_stream}
    for message in (answer, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == REASONING and message.content[2].input == {"path": "a.txt"}
        assert message.stop_reason == "tool_use" and message.usage.cache_read_input_tokens == 8


@pytest.mark.parametrize("model", MODELS[:4])
def test_responses(back: NodeStub, chat: openai.OpenAI, model: str) -> None:
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
    assert back.seen[-1].path == "responses" and back.seen[-1].body == body | {"model": asked(model)}
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
def test_tokens_are_counted_by_the_server(back: NodeStub, claude: anthropic.Anthropic, model: str) -> None:
    tool: Any = {"name": "read", "input_schema": {"type": "object"}}
    ask: Any = [{"role": "user", "content": "Count."}]
    counted = claude.messages.count_tokens(model=model, messages=ask, tools=[tool], system="Be.")
    assert counted.to_dict() == {"input_tokens": 12}
    seen = back.seen[-1]
    assert seen.path == "messages/count_tokens" and seen.headers["x-api-key"] == "server-key"
    name = "served" if model == "served" else model
    assert seen.body == {"model": name, "messages": ask, "tools": [tool], "system": "Be."}


def test_input_tokens_of_responses_are_counted_by_the_server(back: NodeStub, chat: openai.OpenAI) -> None:
    assert chat.responses.input_tokens.count(model="gpt-5.5", input="Count.").input_tokens == 12
    assert back.seen[-1].body == {"model": "gpt-5.5", "input": "Count."}


def test_what_is_wrong_with_a_count_the_server_says(back: NodeStub, web: httpx.Client, proxy: LiteLLMProxy) -> None:
    for path in ("/v1/messages/count_tokens", "/messages/count_tokens"):
        web.post(path, json={"model": "unknown"}, headers={"x-api-key": proxy.master_key})
        assert (back.seen[-1].path, back.seen[-1].body) == ("messages/count_tokens", {"model": "unknown"})


def test_responses_namespaces_and_custom_tools(back: NodeStub, chat: openai.OpenAI) -> None:
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
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    deltas = {"reasoning_summary_text", "function_call_arguments", "custom_tool_call_input"}
    assert {f"response.{name}.delta" for name in deltas} <= set(kinds)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.input_tokens_details.cached_tokens == 8


def test_the_models_are_those_that_the_server_has_now(chat: openai.OpenAI, back: NodeStub) -> None:
    assert [model.id for model in chat.models.list()] == ["served"]
    back.models.append({"id": "pulled-later", "object": "model", "capabilities": {"vision": True}})
    try:
        assert [model.id for model in chat.models.list()] == ["served", "pulled-later"]
    finally:
        back.models.pop()
    assert chat.models.retrieve("openai/org/big").id == "served"


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_what_only_this_server_knows_arrives(web: httpx.Client, proxy: LiteLLMProxy, back: NodeStub, path: str) -> None:
    """Of messages LiteLLM passes on what Anthropic knows; an adapter goes with the model's name."""
    own = {"min_p": 0.1, "top_k": 7, "session_id": "s", "drafts": False, "chat_template_kwargs": {"a": 1}}
    body = {"model": "served", "adapter": "titles", **WAITING[path], **own}
    answer = web.post(f"/v1/{path}", json=body, headers={"x-api-key": proxy.master_key})
    assert answer.status_code == 200 and answer.json()["model"] == "served+titles"
    seen = back.seen[-1].body
    assert seen["model"].removeprefix("asked:") == "served+titles" and "adapter" not in seen
    assert "extra_body" not in seen
    if path != "messages":
        assert {name: seen.get(name) for name in own} == own


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_name_that_means_nothing_gets_the_servers_sentence(web: httpx.Client, proxy: LiteLLMProxy, path: str) -> None:
    body = {"model": "nobody/nothing"} | WAITING[path]
    answer = web.post(f"/v1/{path}", json=body, headers={"Authorization": f"Bearer {proxy.master_key}"})
    assert answer.status_code == 404 and UNKNOWN in answer.json()["error"]["message"]
    chosen = web.post(f"/v1/{path}", json=body | {"model": "small"}, headers={"x-api-key": proxy.master_key})
    assert chosen.status_code == 200


def test_what_models_can_do_is_told_of_those_that_there_are_now(proxy: LiteLLMProxy, back: NodeStub) -> None:
    able = {"tools": False, "reasoning": False, "vision": True, "images": "shown"}
    pulled = {"id": "pulled-later", "object": "model", "context_length": 4000, "capabilities": able, "details": {}}
    heard = {"id": "a-whisper", "object": "model", "capabilities": able, "details": {"task": "transcription"}}
    headers = {"Authorization": f"Bearer {proxy.master_key}"}
    plain = httpx.get(f"{proxy.url}/v1/model/info", headers=headers)
    info = next(entry["model_info"] for entry in plain.json()["data"] if entry["model_name"] == "served")
    assert info["supports_vision"] is False and info["supports_reasoning"] is True
    assert info["supports_function_calling"] is True and info["max_input_tokens"] == CARD.context
    assert "server-key" not in plain.text
    before, back.models[:] = list(back.models), [pulled, heard]
    try:
        answer = httpx.get(f"{proxy.url}/v1/model/info", headers=headers).json()["data"]
        alone = httpx.get(f"{proxy.url}/model/info?litellm_model_id=a-whisper", headers=headers).json()["data"]
    finally:
        back.models[:] = before
    told = {entry["model_name"]: entry["model_info"] for entry in answer}
    assert "served" not in told, "it has gone"
    assert told["default"]["max_input_tokens"] == 4000, "the first one is what every other name means"
    assert told["pulled-later"]["supports_vision"] and not told["pulled-later"]["supports_function_calling"]
    assert [entry["model_info"]["mode"] for entry in alone] == ["audio_transcription"]


WAITING = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    "responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", WAITING)
def test_a_stream_that_waits_shows_life(back: NodeStub, proxy: LiteLLMProxy, path: str) -> None:
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


COUNTS = ["messages/count_tokens", "responses/input_tokens"]
ASKED = [("POST", path) for path in (*WAITING, *COUNTS, "completions", "embeddings")]
ASKED += [("GET", path) for path in ("models", "model/info", "responses/resp_1")]
KEYS = [{}, *({"Authorization": value} for value in ("Bearer sk-wrong", "Bearer", "Basic c2s6c2s=", "Bearer sk-\xe4"))]
KEYS += [{"x-api-key": "wrong"}]


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_no_key_and_a_wrong_key_are_401_that_says_where_the_key_is(
    back: NodeStub, web: httpx.Client, proxy: LiteLLMProxy, method: str, path: str
) -> None:
    before, logged = len(back.seen), len(proxy.log_path.read_text())
    for headers in KEYS:
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = web.request(method, f"/v1/{path}", json={"model": "served"}, headers=raw)  # type: ignore[arg-type]
        assert answer.status_code == 401, headers
        message = answer.json()["error"]["message"]
        assert message.startswith("A valid API key is needed") and "LITELLM_MASTER_KEY, in the file .env" in message
        assert ("type" in answer.json()) is path.startswith("messages"), "an error of the dialect"
    assert len(back.seen) == before
    assert "Traceback" not in proxy.log_path.read_text()[logged:]


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer KEY"}, {"x-api-key": "KEY"}, {"api-key": "KEY"},
                                     {"Authorization": "Bearer sk-other", "x-api-key": "KEY"}])  # fmt: skip
def test_the_key_may_come_in_each_vendors_way(web: httpx.Client, proxy: LiteLLMProxy, headers: dict[str, str]) -> None:
    given = {name: value.replace("KEY", proxy.master_key) for name, value in headers.items()}
    assert web.get("/v1/models", headers=given).status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/ui", "/ui/", "/docs", "/redoc", "/openapi.json", "/swagger", "/key/generate", "/config/yaml",
             "/sso/key/generate", "/get_image", "/v1/images", "/health", "/routes", "/v1/chat/completions/../../ui",
             "/metrics", "/page/feed", "/v1/cache/requests", "/v1/cache/explain"]
)  # fmt: skip
def test_there_is_no_control_panel_and_no_page(web: httpx.Client, proxy: LiteLLMProxy, path: str) -> None:
    for headers in ({}, {"Authorization": f"Bearer {proxy.master_key}"}):
        for method in ("GET", "POST"):
            answer = web.request(method, path, headers=headers, follow_redirects=False)
            assert answer.status_code == 404, (method, path)
            assert answer.json()["error"]["message"] == "There is nothing at this path."


def test_another_host_and_a_foreign_page_are_refused(back: NodeStub, web: httpx.Client, proxy: LiteLLMProxy) -> None:
    key = {"Authorization": f"Bearer {proxy.master_key}"}
    before = len(back.seen)
    for headers in ({"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Origin": "https://evil.example"},
                    {"Origin": "null"}):  # fmt: skip
        body = {"model": "served", "messages": [{"role": "user", "content": "hi"}]}
        answer = web.post("/v1/chat/completions", json=body, headers=key | headers)
        assert answer.status_code == 403, headers
        assert "access-control-allow-origin" not in answer.headers
    assert len(back.seen) == before
    assert web.get("/v1/models", headers=key | {"Host": "localhost:4000"}).status_code == 200


def test_a_local_page_may_ask_and_read(web: httpx.Client, proxy: LiteLLMProxy) -> None:
    page = {"Origin": "http://localhost:3000"}
    asking = page | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = web.options("/v1/chat/completions", headers=asking)
    assert before.status_code == 204 and before.headers["access-control-allow-origin"] == page["Origin"]
    assert before.headers["access-control-allow-methods"] == "POST"
    answer = web.get("/v1/models", headers=page | {"Authorization": f"Bearer {proxy.master_key}"})
    assert answer.headers.get_list("access-control-allow-origin") == [page["Origin"]]
    plain = web.get("/v1/models", headers={"Authorization": f"Bearer {proxy.master_key}"})
    assert not [name for name in plain.headers if name.startswith("access-control-")]
    refused = web.get("/v1/models", headers=page)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == page["Origin"]


def test_another_method_is_405(web: httpx.Client, proxy: LiteLLMProxy) -> None:
    answer = web.get("/v1/chat/completions", headers={"Authorization": f"Bearer {proxy.master_key}"})
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
