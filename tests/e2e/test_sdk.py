"""The vendors' Python clients against the real server, directly and through the proxy that it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from start_llm.clients import CLIENTS
from tests.e2e.install import search_path
from tests.e2e.scenarios import SCENARIOS
from tests.e2e.served import Target, make_served
from tests.e2e.world import World
from tests.oracle.oracle import script
from tests.vendors import anthropic, openai

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
REASONING, TEXT = "Which city?", "I look it up."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RAW = f"<think>\n{REASONING}\n</think>\n\n{TEXT}\n{CALL}"
ASK = "How is the weather? " + script(RAW, "It is sunny.")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path) -> Iterator[tuple[dict[str, Target], World]]:
    with make_served(tmp_path_factory.mktemp("served"), oracle_folder) as made:
        yield made


@pytest.fixture(params=["direct", "proxy", "wildcard"])
def target(request: pytest.FixtureRequest, served: tuple[dict[str, Target], World]) -> Target:
    return served[0][request.param]


@pytest.fixture
def chat(target: Target) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key=target.key, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(target: Target) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=target.url, api_key=target.key, max_retries=0) as client:
        yield client


def test_chat(target: Target, chat: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    messages: list[Any] = [{"role": "user", "content": ASK}]
    answer = chat.chat.completions.create(model=target.model, messages=messages, tools=tools)
    message = answer.choices[0].message
    assert (message.content or "").strip() == TEXT and message.reasoning_content.strip() == REASONING  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
    assert message.tool_calls[0].function.name == "weather"  # type: ignore[union-attr]
    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}]
    after = chat.chat.completions.create(model=target.model, messages=messages, tools=tools)
    assert after.choices[0].message.content == "It is sunny."
    assert after.usage is not None and after.usage.prompt_tokens_details is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) > answer.usage.prompt_tokens - 8  # type: ignore[union-attr]


def test_chat_stream(target: Target, chat: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    with chat.chat.completions.stream(
        model=target.model, messages=[{"role": "user", "content": ASK}], tools=tools
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.content or "").strip() == TEXT
    assert message.tool_calls is not None and message.tool_calls[0].function.arguments == '{"city": "Paris"}'


def test_messages(target: Target, claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
    given: Any = {"model": target.model, "max_tokens": 2000, "tools": [tool], "thinking": {"type": "adaptive"}}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    answer = claude.messages.create(messages=messages, **given)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.stop_reason == "tool_use" and answer.content[2].input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "sun"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    with claude.messages.stream(messages=messages, **given) as stream:
        after = stream.get_final_message()
    assert after.content[-1].type == "text" and after.content[-1].text == "It is sunny."
    assert (after.usage.cache_read_input_tokens or 0) > after.usage.input_tokens


def test_count_tokens(target: Target, claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count this text, please. " * 20}]
    counted = claude.messages.count_tokens(model=target.model, messages=messages).input_tokens
    usage = claude.messages.create(model=target.model, messages=messages, max_tokens=20).usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert counted == sum(part or 0 for part in parts)


def test_responses(target: Target, chat: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False} | FUNCTION
    answer = chat.responses.create(model=target.model, input=ASK, tools=[tool])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    call = answer.output[2]
    assert call.type == "function_call" and call.arguments == '{"city": "Paris"}'
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    after = chat.responses.create(model=target.model, input=output, previous_response_id=answer.id, tools=[tool])
    assert after.output_text == "It is sunny."


def test_responses_stream(target: Target, chat: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False} | FUNCTION
    events = list(chat.responses.create(model=target.model, input=ASK, tools=[tool], stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.strip() == TEXT


@pytest.mark.parametrize("name", list(CLIENTS))
def test_every_agent_through_the_proxy(name: str, served: tuple[dict[str, Target], World]) -> None:
    path = os.pathsep.join(str(folder) for folder in search_path(name))
    if shutil.which(name, path=path) is None:
        pytest.skip(f"{CLIENTS[name].title} is not installed: python3.12 tests/e2e/install.py {name}")
    world, scenario = served[1], SCENARIOS[name]
    repository = world.repository(name)
    data = world.folder / name / "cache" / "launch" / name
    texts = scenario.work(repository)
    arguments, text = scenario.first(f"Repair add. {script(*texts)}", data)
    with world.beside(name, repository, *scenario.beside) if scenario.beside else nullcontext():
        run = world.launch(name, repository, arguments, text, scenario.seconds)
    assert run.code == 0, run.output[-3000:]
    assert (repository / "out.txt").read_text() == "3\n"
    assert {entry["status"] for entry in run.served} == {200} and len(run.served) >= len(texts)
    dialect = {"claude": "messages", "codex": "responses"}.get(name, "chat")
    assert {entry["dialect"] for entry in run.served} == {dialect}
    for entry in [entry for entry in run.served if entry["tools"]][1:]:
        assert entry["reused"] > 0.9 * entry["prompt"], entry
