"""What the fields of a body become, and how a wrong one is refused, in each dialect."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

import pytest

from start_llm.api.common.request import agent_of
from start_llm.core.errors import BadRequest, NotSupported, StartLLMError
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.request import Sampling
from tests.api.fakes import USER, exchange, read

OBJECT = {"type": "object"}
TEXT = {"type": "text", "text": "a"}
CHATS: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": OBJECT}}
STRICT = CHATS | {"function": CHATS["function"] | {"strict": True}}
OTHER = {"type": "function", "function": {"name": "g"}}
CLAUDES: Any = {"name": "f", "description": "d", "input_schema": OBJECT}
FLAT: Any = {"type": "function", "name": "f", "parameters": OBJECT, "strict": False}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": OBJECT}}
FORM_FLAT = {"type": "json_schema", "name": "s", "schema": OBJECT, "strict": True}
USER_ID = {"user_id": json.dumps({"device_id": "d", "session_id": "s"})}
ADDED = {"type": "additional_tools", "role": "developer", "tools": [FLAT]}
DRAWN = {
    "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0, "repetition_penalty": 1.2, "repetition_context_size": 9,
    "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"9": 5, "3": -100}, "seed": 7,
}  # fmt: skip
SAMPLED = Sampling(
    temperature=0, top_p=0.5, top_k=0, min_p=0, repetition_penalty=1.2, repetition_context_size=9, presence_penalty=-1,
    frequency_penalty=2, logit_bias=((3, -100), (9, 5)), seed=7,
)  # fmt: skip
OPTIONS = {
    "temperature": 0, "top_p": 0.5, "top_k": 0, "min_p": 0, "repeat_penalty": 1.2, "repeat_last_n": 9, "seed": 7,
    "num_predict": 9, "stop": ["A", "B"], "presence_penalty": -1, "frequency_penalty": 2, "num_ctx": 4096, "num_gpu": 1,
    "logit_bias": {"9": 5, "3": -100}, "mirostat": 0,
}  # fmt: skip
CONTROLS = {"max_tokens": 5, "max_completion_tokens": 6, "n": 3, "stop": ["a", "b"], "stream": True, "logprobs": True}


def thinks(enabled: bool | None, effort: str | None = None, budget: int | None = None) -> dict[str, Any]:
    return {"thinking": enabled, "reasoning_effort": effort, "thinking_budget": budget, "template_kwargs": {}}


READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chat", {}, thinks(None)),
    ("chat", {"enable_thinking": False}, thinks(False)),
    ("chat", {"thinking": "off"}, thinks(False)),
    ("chat", {"thinking": "xhigh"}, thinks(True, "xhigh")),
    ("chat", {"thinking": {"type": "enabled", "budget_tokens": 500}}, thinks(True, budget=500)),
    ("chat", {"thinking": {"type": "disabled"}}, thinks(False)),
    ("chat", {"reasoning_effort": "none"}, thinks(False)),
    ("chat", {"reasoning_effort": "low"}, thinks(True, "low")),
    ("chat", {"reasoning": {"effort": "high", "max_tokens": 9}}, thinks(True, "high", 9)),
    ("chat", {"reasoning": {"enabled": False}}, thinks(False)),
    ("chat", {"reasoning": {"max_tokens": 0}}, thinks(False, budget=0)),
    ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, thinks(False)),
    ("chat", {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, thinks(True)),
    ("chat", {"metadata": {"thinking": "high"}}, thinks(True, "high")),
    ("chat", {"metadata": {"thinking": "about cats"}}, thinks(None)),
    ("chat", {"enable_thinking": False, "reasoning_effort": "high"}, thinks(False, "high")),
    ("chat", {"chat_template_kwargs": {"preserve_thinking": True}}, {"template_kwargs": {"preserve_thinking": True}}),
    ("chat", {"top_p": 0}, {"sampling.temperature": 0}),
    ("chat", DRAWN, {"sampling": SAMPLED}),
    ("chat", CONTROLS, {"max_tokens": 6, "n": 3, "stop": ("a", "b"), "stream": True, "logprobs": 0}),
    ("chat", {"n": 2, "best_of": 2}, {"n": 2}),
    ("chat", {"tools": [STRICT], "tool_choice": "required"}, {"tool_choice.mode": "required", "tools": (
        Tool("f", "d", OBJECT, strict=True),)}),
    ("chat", {"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ("chat", {"tools": [CHATS, OTHER], "tool_choice": ALLOWED}, {"tool_choice.mode": "required", "tools": (
        Tool("g", "", OBJECT | {"properties": {}}),)}),
    ("chat", {"response_format": FORM}, {"response_format.kind": "json_schema", "response_format.name": "s"}),
    ("chat", {"response_format": FORM}, {"response_format.param": "response_format.json_schema.schema"}),
    ("chat", {"response_format": {"type": "json_object", "schema": OBJECT}, "top_logprobs": 0},
     {"response_format.kind": "json_schema", "response_format.schema": OBJECT}),
    # any JSON value would do for an empty schema, and an object was asked for
    ("chat", {"response_format": {"type": "json_object", "schema": {}}}, {"response_format.kind": "json_object"}),
    ("chat", {"response_format": {"type": "json_object", "schema": None}}, {"response_format.kind": "json_object"}),
    ("chat", {"store": True, "service_tier": "auto", "temperature": None, "tools": None, "stop": None},
     {"sampling.temperature": 0.1, "tools": (), "stop": ()}),
    ("chat", {"model": None}, {"model": ""}),
    # an adapter beside the model goes before one in `extra_body`
    ("chat", {"extra_body": {"adapter": "b"}}, {"model": "m+b"}),
    ("chat", {"adapter": "a", "extra_body": {"adapter": "b"}}, {"model": "m+a"}),
    ("messages", {}, thinks(False)),
    ("messages", {"thinking": {"type": "adaptive"}}, thinks(True)),
    ("messages", {"thinking": {"type": "disabled"}}, thinks(False)),
    ("messages", {"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
     {"tool_choice.mode": "named", "tool_choice.name": "f", "parallel_tool_calls": False}),
    ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "any"}}, {"tool_choice.mode": "required"}),
    ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "auto", "name": None}}, {"tool_choice.mode": "auto"}),
    ("messages", {"tool_choice": {"type": "none"}}, {"tool_choice.mode": "none"}),
    ("messages", {"output_config": {"format": FORM_FLAT}},
     {"response_format.kind": "json_schema", "response_format.param": "output_config.format.schema"}),
    ("messages", {"output_format": FORM_FLAT}, {"response_format.param": "output_format.schema"}),
    ("messages", {"model": None}, {"model": ""}),
    ("messages", {"metadata": USER_ID}, {"session": "s"}),
    ("ollama", {"options": OPTIONS}, {"sampling": SAMPLED, "max_tokens": 9, "stop": ("A", "B")}),
    ("ollama", {"options": {"num_predict": -1}, "keep_alive": "5m"}, {"max_tokens": None}),
    ("ollama", {"options": {"num_predict": -2}}, {"max_tokens": None}),
    ("ollama", {"options": {"top_k": 40.0, "seed": 1.0, "num_predict": 5.0}},  # whole numbers, written as floats
     {"sampling.top_k": 40, "sampling.seed": 1, "max_tokens": 5}),
    ("ollama", {"think": "max"}, {"reasoning_effort": "max"}),
    ("ollama", {"format": OBJECT}, {"response_format.kind": "json_schema", "response_format.schema": OBJECT}),
    ("ollama", {"format": "json"}, {"response_format.kind": "json_object"}),
    ("responses", {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}}, {"tool_choice.name": "f"}),
    ("responses", {"reasoning": {"effort": "low", "summary": "auto"}}, thinks(True, "low")),
    ("responses", {"text": {"format": FORM_FLAT, "verbosity": "low"}}, {"response_format.name": "s"}),
    ("responses", {"max_output_tokens": 7, "parallel_tool_calls": False, "model": None, "temperature": 0.5},
     {"max_tokens": 7, "parallel_tool_calls": False, "model": "", "sampling.temperature": 0.5}),
    ("responses", {"input": [ADDED, {"role": "user", "content": "x"}]}, {"tools": (Tool("f", "", OBJECT),)}),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "fields", "found"), READ)
def test_what_a_field_becomes(dialect: str, fields: dict[str, Any], found: dict[str, Any]) -> None:
    request = read(dialect, **fields)
    assert {name: attrgetter(name)(request) for name in found} == found


@pytest.mark.parametrize(
    ("dialect", "headers", "fields", "session"),
    [
        ("chat", {}, {"session_id": "a", "user": "u"}, "a"),
        ("chat", {}, {"metadata": {"thread_id": "b"}}, "b"),
        ("chat", {}, {"extra_body": {"chat_id": "c"}}, "c"),
        ("chat", {}, {"prompt_cache_key": "d", "user": "u"}, None),
        ("chat", {"x-session-affinity": "f"}, {"safety_identifier": "g"}, None),
        ("chat", {"x-session-id": "e"}, {"user": "u"}, "e"),
        ("chat", {"x-openwebui-chat-id": "h"}, {"user": "u"}, "h"),
        ("chat", {}, {"session_id": 7}, "7"),
        ("chat", {}, {"session_id": True}, None),
        ("responses", {"session_id": "abc"}, {}, "abc"),
        ("messages", {"x-claude-code-agent-id": "a"}, {"metadata": USER_ID}, "s/a"),
    ],
)
def test_session(dialect: str, headers: dict[str, str], fields: dict[str, Any], session: str | None) -> None:
    assert read(dialect, headers, **fields).session == session


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-session-id": "s" * 1025}, {}, "x-session-id"),
        ({"x-session-id": "s", "x-claude-code-agent-id": "a" * 1024}, {}, "x-claude-code-agent-id"),
        ({}, {"metadata": {"user_id": json.dumps({"session_id": "s" * 1025})}}, "metadata.user_id.session_id"),
        ({}, {"extra_body": {"chat_id": "s" * 1025}}, "extra_body.chat_id"),
    ],
)
def test_a_name_that_is_too_long_is_told_where_it_stands(headers: dict[str, str], fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read("messages", headers, **fields)
    assert refused.value.param == param and str(refused.value).startswith(f"{param}: at most 1,024 characters")


def test_a_stream_has_its_usage_where_that_is_asked_for() -> None:
    asked = [exchange("chat", stream_options=options) for options in (None, {}, {"include_usage": True})]
    assert [each.include_usage for each in asked] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "agent", "name"),
    [
        ("", "codex_cli_rs/0.1 (Linux)", "codex_cli_rs"),
        ("", "Mozilla/5.0 (X11)", "browser"),
        ("", "<img src=x>/1", "other"),
        ("", "", "other"),
        ("", "x" * 500, "x" * 40),
        ("", "a\u00e9b/1", "a"),
        ("You are Claude Code, a helper", "axios/1", "claude code"),
        ("You are an expert coding assistant operating inside pi, a coding agent harness.", "OpenAI/JS 6.1", "pi"),
        ("You are Cline, an AI coding agent.", "OpenAI/JS 6.1", "cline"),
        ("You know pi: 3.14.", "OpenAI/JS 6.1", "OpenAI"),
    ],
)
def test_an_agent_has_a_name(text: str, agent: str, name: str) -> None:
    """It is its product's, or what its system text says."""
    told = [{"role": "system", "content": text}] if text else []
    assert agent_of(read("chat", messages=[*told, *USER]).messages, {"User-Agent": agent}) == name


# --- the messages of a chat ---


def messages(*items: dict[str, Any]) -> tuple[Message, ...]:
    return read("chat", messages=list(items)).messages


def test_roles_and_contents_keep_their_place() -> None:
    assert messages(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a", "x": {}}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "later"},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1"}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"b": "é"}}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
    ) == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message("system", "later"),
        Message(
            "assistant", "", reasoning="why",
            tool_calls=(ToolCall("c1", "f", '{"a": 1'), ToolCall("c2", "g", '{"b": "é"}')),
        ),
        Message("tool", "ok", tool_call_id="c1"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"content": "No.", "refusal": "I must not."}, "No.\nI must not."),
        ({"content": None, "refusal": "I must not."}, "I must not."),
        ({"content": None, "audio": {"id": "a", "transcript": "Hi there."}}, "Hi there."),
        ({"content": "Hi there.", "audio": {"id": "a", "transcript": "Hi there."}}, "Hi there."),
        ({"content": "Hi there.", "audio": {"id": "a"}}, "Hi there."),
    ],
)
def test_all_that_an_assistant_said_is_shown(given: dict[str, Any], shown: str) -> None:
    assert messages({"role": "assistant"} | given)[0] == Message("assistant", shown)


def test_a_spoken_answer_without_words_is_refused_by_its_name() -> None:
    with pytest.raises(NotSupported, match=r"messages\[0\]\.audio: .* send what was said"):
        messages({"role": "assistant", "content": None, "audio": {"id": "a"}})


def test_there_must_be_something_to_continue() -> None:
    last = {"role": "assistant", "content": "So"}
    assert read("chat", messages=[*USER, last], continue_final_message=True).messages[-1].content
    with pytest.raises(BadRequest, match="continue_final_message: the last message"):
        read("chat", continue_final_message=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "why"}]},
        {"content": [{"type": "thinking", "thinking": "why"}, TEXT]},
        {"content": [{"type": "thinking", "thinking": [TEXT | {"text": "why"}]}, TEXT]},
    ],
)
def test_reasoning_comes_in_many_shapes(fields: dict[str, Any]) -> None:
    assert messages({"role": "assistant", "content": "a"} | fields) == (Message("assistant", "a", reasoning="why"),)
    unknown = {"role": "assistant", "content": "a", "reasoning": [{"text": "why"}]}
    assert messages(unknown)[0].reasoning == '[{"text": "why"}]'


def test_legacy_functions() -> None:
    request = read(
        "chat",
        functions=[{"name": "f"}],
        function_call={"name": "f"},
        messages=[
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "r"},
        ],
    )
    assert request.tools[0].name == "f"
    assert (request.tool_choice.mode, request.tool_choice.name) == ("named", "f")
    assert request.messages[1].tool_call_id == request.messages[0].tool_calls[0].id


def test_half_an_emoji_is_mended() -> None:
    assert messages({"role": "user", "content": "a\ud83d b\ud83d\ude00"})[0].content == "a\ufffd b\U0001f600"


def test_more_candidates_than_answers_are_not_made() -> None:
    with pytest.raises(NotSupported, match="best_of"):
        read("chat", n=2, best_of=3)


# --- what is wrong ---


def user(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*parts]}]}


def group(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "", "tools": [*tools]}


def edits(given: Any) -> dict[str, Any]:
    return {"context_management": {"edits": given}}


CLEAR, FEWER = {"type": "clear_tool_uses_20250919"}, {"type": "tool_uses", "value": -1}
GROUPED = {"tools": [group("g", FLAT)]}
CUSTOM: Any = {"type": "custom", "name": "c"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CALL = {"type": "function_call", "call_id": "c", "name": "f"}
G = {"type": "function", "function": {"name": "g"}}
NOT_PARALLEL = {"type": "auto", "disable_parallel_tool_use": 1}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "x"}, "messages"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, "messages[1].content"),
    ("chat", user(TEXT, {"type": "hologram"}), "messages[0].content[1].type"),
    ("chat", user(TEXT, {"type": "text", "text": 4}), "messages[0].content[1].text"),
    ("chat", user(TEXT, 7), "messages[0].content[1]"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ("chat", {"temperature": 3}, "temperature"),
    ("chat", {"temperature": "hot"}, "temperature"),
    ("chat", {"top_p": True}, "top_p"),
    ("chat", {"n": 0}, "n"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"stop": [""]}, "stop[0]"),
    ("chat", {"stop": 3}, "stop"),
    ("chat", {"logit_bias": {"a": 1}}, "logit_bias.a"),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias.1"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("chat", {"tools": [CHATS, CHATS]}, "tools[1]"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tools": [CHATS], "tool_choice": G}, "tool_choice"),
    ("chat", {"tools": [CHATS], "tool_choice": "sometimes"}, "tool_choice"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ("chat", {"reasoning_effort": "lots"}, "reasoning_effort"),
    ("chat", {"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
    ("chat", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("messages", {"max_tokens": 0}, "max_tokens"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("messages", user({"type": "hologram"}), "messages[0].content[0].type"),
    ("messages", user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    ("messages", user({"type": "tool_use", "input": 3}, role="assistant"), "messages[0].content[0].input"),
    ("messages", {"system": 4}, "system"),
    ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ("messages", {"tools": [CLAUDES, CLAUDES]}, "tools[1]"),
    ("messages", {"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ("messages", {"tools": [CLAUDES | {"strict": "yes"}]}, "tools[0].strict"),
    ("messages", {"tools": [CLAUDES], "tool_choice": NOT_PARALLEL}, "tool_choice.disable_parallel_tool_use"),
    ("messages", {"stop_sequences": "END", "thinking": {"type": "maybe"}}, "thinking.type"),
    ("messages", edits([{"type": "clear_all"}]), "context_management.edits[0].type"),
    ("messages", edits({"a": 1}), "context_management.edits"),
    ("messages", edits([CLEAR | {"keep": FEWER}]), "context_management.edits[0].keep.value"),
    ("messages", edits([CLEAR | {"exclude_tools": "read"}]), "context_management.edits[0].exclude_tools"),
    ("responses", {"input": []}, "input"),
    ("responses", {"input": 5}, "input"),
    ("responses", {"input": ["x"]}, "input[0]"),
    ("responses", {"input": [{"type": "hologram"}]}, "input[0].type"),
    ("responses", {"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ("responses", {"input": user({"type": "x"})["messages"]}, "input[0].content[0].type"),
    ("responses", {"input": [CALL]}, "input[0].arguments"),
    ("responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ("responses", {"input": [CALL | {"arguments": "", "namespace": 1}]}, "input[0].namespace"),
    ("responses", {"input": [{"type": "agent_message", "content": "x"}]}, "input[0].content"),
    ("responses", {"input": [{"type": "agent_message", "content": [{"type": "encrypted_content"}]}]},
     "input[0].content[0].encrypted_content"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("responses", {"max_tool_calls": 0}, "max_tool_calls"),
    ("responses", {"truncation": "x"}, "truncation"),
    ("responses", {"service_tier": 5}, "service_tier"),
    ("responses", {"model": 5}, "model"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tools": ["x"]}, "tools[0]"),
    ("responses", {"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
    ("responses", {"tools": [group("n") | {"tools": {}}]}, "tools[0].tools"),
    ("responses", {"tools": [group("n", "x")]}, "tools[0].tools[0]"),
    ("responses", {"tools": [group("n") | {"description": 1}]}, "tools[0].description"),
    ("responses", {"tools": [group("n", {"type": "function"})]}, "tools[0].tools[0].name"),
    ("responses", {"tools": [group("a", FLAT), FLAT | {"name": "a__f"}]}, "tools[1]"),
    ("responses", {"tools": [group("a", FLAT | {"name": "b__f"}), group("a__b", FLAT)]}, "tools[1].tools[0]"),
    ("responses", {"tools": [{"type": "custom"}]}, "tools[0].name"),
    ("responses", {"tools": [CUSTOM | {"description": 1}]}, "tools[0].description"),
    ("responses", {"tools": [CUSTOM | {"format": {"type": ["text"]}}]}, "tools[0].format.type"),
    ("responses", {"tools": [CUSTOM | {"format": 1}]}, "tools[0].format.type"),
    ("responses", {"tools": [CUSTOM | {"format": GRAMMAR | {"definition": 1}}]}, "tools[0].format.definition"),
    ("responses", {"tools": [CUSTOM | {"format": GRAMMAR | {"syntax": None}}]}, "tools[0].format.syntax"),
    ("responses", GROUPED | {"tool_choice": {"type": "function", "name": "f", "namespace": "other"}}, "tool_choice"),
    ("responses", GROUPED | {"tool_choice": {"type": "custom"}}, "tool_choice"),
    ("responses", GROUPED | {"tool_choice": {"type": "allowed_tools", "tools": 1}}, "tool_choice.tools"),
    ("responses", GROUPED | {"tool_choice": {"type": "allowed_tools", "tools": [1]}}, "tool_choice.tools[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body", "param"), WRONG)
def test_bad_fields_are_named(dialect: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(StartLLMError) as caught:
        read(dialect, **body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[0].split("[")[0] in caught.value.message


def test_errors_are_in_the_words_of_json() -> None:
    for body, word in (
        ({"messages": ["Hi"]}, 'messages[0]: must be an object, but got "Hi".'),
        ({"messages": []}, "messages: must be a list with at least one item, but got []."),
        ({"messages": "Hi"}, 'messages: must be a list, but got "Hi".'),
        ({"metadata": 5}, "metadata: must be an object, but got 5."),
    ):
        with pytest.raises(StartLLMError) as caught:
            read("chat", **body)
        assert caught.value.message == word
