"""The embedded model's chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from start_llm.models.embedded import chat_template
from tests.kinds import rounds

TEMPLATE = chat_template()
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "Read a file", "parameters": {"type": "object", "properties": {}}},
}


def render(messages: list[dict[str, Any]], *, prompt: bool = False, **names: Any) -> str:
    texts, _ = render_jinja_template([messages], chat_template=TEMPLATE, add_generation_prompt=prompt, **names)
    return str(texts[0])


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}


def test_plain_chat_is_chatml_with_a_default_system_text() -> None:
    assert render([{"role": "user", "content": "Hi"}], prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_go_into_the_system_text() -> None:
    text = render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], tools=[TOOL])
    system = text.partition("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(listed) == TOOL
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.parametrize("arguments", [{"path": "ä.txt", "n": 1}, '{"path": "ä.txt", "n": 1}'])
def test_tool_calls_take_arguments_as_mapping_or_string(arguments: Any) -> None:
    messages = [
        {"role": "user", "content": "Read it"},
        {"role": "assistant", "content": "Now.", "tool_calls": [call(arguments), call(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
    ]
    one = '<tool_call>\n{"name": "read", "arguments": {"path": "ä.txt", "n": 1}}\n</tool_call>'
    assert render(messages).endswith(
        f"<|im_start|>assistant\nNow.\n{one}\n{one}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\ntext\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", ["", {}, None])
def test_a_call_without_arguments_and_without_text(arguments: Any) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
    ]
    assert render(messages).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_reasoning_of_every_past_turn_is_shown() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "first"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "second"},
        {"role": "user", "content": "e"},
    ]
    text = render(messages)
    assert "<|im_start|>assistant\n<think>\nfirst\n</think>\n\nb<|im_end|>" in text
    assert "<|im_start|>assistant\n<think>\nsecond\n</think>\n\nd<|im_end|>" in text


def test_only_thinking_turned_off_adds_an_empty_block() -> None:
    messages = [{"role": "user", "content": "a"}]
    bare = render(messages, prompt=True)
    assert render(messages, prompt=True, enable_thinking=True) == bare
    assert render(messages, prompt=True, enable_thinking=False) == bare + "<think>\n\n</think>\n\n"
    assert render(messages, enable_thinking=False) == render(messages)


def test_content_parts_developer_and_later_system_messages() -> None:
    messages = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "Note"},
    ]
    assert render(messages) == (
        "<|im_start|>system\nRules<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>system\nNote<|im_end|>\n"
    )


TEXT = st.text(max_size=8)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXT}),
        st.fixed_dictionaries(
            {
                "role": st.just("assistant"),
                "content": st.one_of(st.none(), TEXT),
                "reasoning_content": st.one_of(st.none(), TEXT),
                "tool_calls": st.lists(st.builds(call, st.dictionaries(TEXT, TEXT, max_size=1)), max_size=2),
            }
        ),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=rounds(50), deadline=None)
@given(MESSAGES, st.data())
def test_a_longer_conversation_starts_with_the_shorter_one(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(messages) - 1))
    assert render(messages, tools=[TOOL]).startswith(render(messages[:cut], tools=[TOOL]))
