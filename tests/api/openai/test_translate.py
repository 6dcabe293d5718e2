"""Chat bodies to requests: every field, every refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from start_llm.core.errors import BadRequest, NotSupported, StartLLMError
from start_llm.core.messages import Message, ToolCall
from tests.api.fakes import exchange
from tests.api.fakes import read as reading

TEXT = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


read = partial(reading, "chat")


def messages(*items: dict[str, Any]) -> tuple[Message, ...]:
    return read(messages=list(items)).messages


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
    assert read(messages=[{"role": "user", "content": "Hi"}, last], continue_final_message=True).messages[-1].content
    with pytest.raises(BadRequest, match="continue_final_message: the last message"):
        read(continue_final_message=True)


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


def test_reasoning_of_an_unknown_shape_is_shown_as_it_is() -> None:
    sent = {"role": "assistant", "content": "a", "reasoning": [{"text": "why"}]}
    assert messages(sent)[0].reasoning == '[{"text": "why"}]'


def test_legacy_functions() -> None:
    request = read(
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


@pytest.mark.parametrize(
    ("fields", "enabled", "effort", "budget"),
    [
        ({}, None, None, None),
        ({"enable_thinking": False}, False, None, None),
        ({"thinking": "off"}, False, None, None),
        ({"thinking": "xhigh"}, True, "xhigh", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 500}}, True, None, 500),
        ({"thinking": {"type": "disabled"}}, False, None, None),
        ({"reasoning_effort": "none"}, False, None, None),
        ({"reasoning_effort": "low"}, True, "low", None),
        ({"reasoning": {"effort": "high", "max_tokens": 9}}, True, "high", 9),
        ({"reasoning": {"enabled": False}}, False, None, None),
        ({"reasoning": {"max_tokens": 0}}, False, None, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None, None),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True, None, None),
        ({"metadata": {"thinking": "high"}}, True, "high", None),
        ({"metadata": {"thinking": "about cats"}}, None, None, None),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False, "high", None),
    ],
)
def test_thinking(fields: dict[str, Any], enabled: bool | None, effort: str | None, budget: int | None) -> None:
    request = read(**fields)
    assert (request.thinking, request.reasoning_effort, request.thinking_budget) == (enabled, effort, budget)
    assert "enable_thinking" not in request.template_kwargs


def test_template_kwargs_pass() -> None:
    assert read(chat_template_kwargs={"preserve_thinking": True}).template_kwargs == {"preserve_thinking": True}


def test_sampling() -> None:
    sampling = read(
        temperature=0, top_p=0.5, top_k=-1, min_p=0, repetition_penalty=1.2, repetition_context_size=9,
        presence_penalty=-1, frequency_penalty=2, logit_bias={"9": 5, "3": -100}, seed=7,
    ).sampling  # fmt: skip
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0)
    assert (sampling.repetition_penalty, sampling.repetition_context_size) == (1.2, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (-1, 2, 7)
    assert sampling.logit_bias == ((3, -100), (9, 5))
    assert read(top_p=0).sampling.temperature == 0


def test_output_controls() -> None:
    request = read(
        max_tokens=5, max_completion_tokens=6, n=3, stop=["a", "b"], stream=True, logprobs=True,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        tools=[TOOL | {"function": TOOL["function"] | {"strict": True}}], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    assert (request.max_tokens, request.n, request.stop) == (6, 3, ("a", "b"))
    assert (request.stream, request.logprobs) == (True, 0)
    assert (request.response_format.kind, request.response_format.name) == ("json_schema", "s")
    assert request.tools[0].strict
    assert request.tool_choice.mode == "required"
    assert not request.parallel_tool_calls
    asked = [exchange("chat", stream_options=options) for options in (None, {}, {"include_usage": True})]
    assert [each.include_usage for each in asked] == [False, False, True]


def test_allowed_tools_leave_the_named_ones() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "g"}}]}}  # fmt: skip
    request = read(tools=[TOOL, other], tool_choice=choice)
    assert [tool.name for tool in request.tools] == ["g"]
    assert request.tool_choice.mode == "required"


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({}, {"session_id": "a", "user": "u"}, "a"),
        ({}, {"metadata": {"thread_id": "b"}}, "b"),
        ({}, {"extra_body": {"chat_id": "c"}}, "c"),
        ({}, {"prompt_cache_key": "d"}, None),
        ({"x-session-affinity": "f"}, {"safety_identifier": "g"}, None),
        ({"x-session-id": "e"}, {"user": "u"}, "e"),
        ({"x-openwebui-chat-id": "h"}, {"user": "u"}, "h"),
        ({}, {"user": "u"}, None),
        ({}, {"session_id": 7, "user": "u"}, "7"),
        ({}, {"session_id": True}, None),
        ({}, {}, None),
    ],
)
def test_session(headers: dict[str, str], fields: dict[str, Any], session: str | None) -> None:
    assert read(headers, **fields).session == session


def user(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, "messages[1].content"),
        (user({"type": "hologram"}), "messages[0].content[1].type"),
        (user({"type": "text", "text": 4}), "messages[0].content[1].text"),
        (user(7), "messages[0].content[1]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": True}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_bad_fields_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(StartLLMError) as caught:
        read(**body)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)
    assert param.split(".")[0].split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        user({"type": "input_audio"}),
        user({"type": "file"}),
        {"modalities": ["text", "audio"]},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    ],
)
def test_what_is_not_supported_says_so(body: dict[str, Any]) -> None:
    with pytest.raises(NotSupported):
        read(**body)


def test_half_an_emoji_is_mended() -> None:
    assert messages({"role": "user", "content": "a\ud83d b\ud83d\ude00"})[0].content == "a\ufffd b\U0001f600"


def test_unknown_fields_and_nulls_are_ignored() -> None:
    assert read(store=True, service_tier="auto", temperature=None, tools=None, stop=None).sampling.temperature == 0.1
    assert read(model=None).model == ""


def test_an_adapter_beside_the_model_goes_before_one_in_extra_body() -> None:
    assert read(extra_body={"adapter": "b"}).model == "m+b"
    assert read(adapter="a", extra_body={"adapter": "b"}).model == "m+a"


def test_errors_are_in_the_words_of_json() -> None:
    for body, word in (
        ({"messages": ["Hi"]}, 'messages[0]: must be an object, but got "Hi".'),
        ({"messages": []}, "messages: must be a list with at least one item, but got []."),
        ({"messages": "Hi"}, 'messages: must be a list, but got "Hi".'),
        ({"metadata": 5}, "metadata: must be an object, but got 5."),
    ):
        with pytest.raises(StartLLMError) as caught:
            read(**body)
        assert caught.value.message == word


def test_more_candidates_than_answers_are_not_made() -> None:
    assert read(n=2, best_of=2).n == 2
    with pytest.raises(NotSupported, match="best_of"):
        read(n=2, best_of=3)


def test_a_schema_knows_its_field() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    assert read(response_format=schema).response_format.param == "response_format.json_schema.schema"
