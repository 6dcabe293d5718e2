"""The official OpenAI and Anthropic clients against the real server, directly and through the proxy."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from start_llm.api.media.audio import SOUNDS
from start_llm.audio.samples import look_at
from start_llm.core.extras import is_installed
from tests.audio.tiny import build_whisper, tone, wav
from tests.audio.voice import build_voice
from tests.embeddings.reference import Reference
from tests.embeddings.tiny import build_encoder
from tests.integration.live import TOOLS, WAIT, Live, live
from tests.kinds import RUN
from tests.models.lora import build_adapter, build_base
from tests.oracle import script
from tests.vendors import anthropic, openai

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "line": 3}}\n</tool_call>'
THOUGHT = "<think>\nI must read it\n</think>\n\n"
ANTHROPIC_TOOLS: Any = [
    {
        "name": t["function"]["name"],  # type: ignore[index]
        "description": t["function"]["description"],  # type: ignore[index]
        "input_schema": t["function"]["parameters"],  # type: ignore[index]
    }
    for t in TOOLS
]
START_SECONDS = 360.0  # LiteLLM computes for 8 s; on a machine with busy neighbours that may take minutes

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(scope="module")
def proxied(oracle_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    cache = tmp_path_factory.mktemp("proxied")
    settings: dict[str, Any] = {
        "proxy": "on",
        "proxy_port": 0,
        "proxy_startup_wait_seconds": START_SECONDS,
        "litellm_master_key": "sk-test",
    }
    if RUN.whole:
        build_adapter(cache / "adapters" / "titles", build_base(cache / "models" / "tiny-base"))
        settings |= {
            "embedding_model": str(build_encoder(cache / "tiny-encoder")),
            "transcription_model": str(build_whisper(cache / "tiny-whisper")),
            "speech_model": str(build_voice(cache / "tiny-voice")),
        }
    with live(oracle_path("plain"), cache, **settings) as server:
        assert server.app.proxy is not None
        assert server.app.proxy.wait_ready(START_SECONDS), server.app.proxy.log_tail()
        yield server


@pytest.fixture(params=["direct", "proxy"])
def target(request: pytest.FixtureRequest, proxied: Live) -> tuple[str, str]:
    """(base URL, key)"""
    if request.param == "direct":
        return proxied.url, "none"
    assert proxied.app.proxy_url is not None
    return proxied.app.proxy_url, "sk-test"


@pytest.fixture
def client(target: tuple[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{target[0]}/v1", api_key=target[1], max_retries=0, timeout=WAIT) as made:
        yield made


@pytest.fixture
def claude(target: tuple[str, str]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=target[0], api_key=target[1], max_retries=0, timeout=WAIT) as made:
        yield made


@pytest.fixture
def needs_embeddings() -> None:
    if not is_installed("mlx_embeddings"):
        pytest.skip("mlx-embeddings is not installed: pip install '.[embeddings]' -c constraints.txt")


def asked(*answers: str) -> list[Any]:
    return [{"role": "user", "content": script(*answers)}]


@pytest.mark.smoke
def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-4o", messages=asked("Hello there."))
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_openai_stream_with_reasoning_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="gpt-4o",
        messages=asked(THOUGHT + "It is a long answer, in many pieces."),
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasoning, usage, pieces = "", "", None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            pieces += bool(choice.delta.content)
    assert text == "It is a long answer, in many pieces."
    assert reasoning.strip() == "I must read it"
    assert pieces > 3
    assert usage is not None
    assert usage.prompt_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_calls(client: openai.OpenAI, stream: bool) -> None:
    other = CALL.replace("a.py", "b.py")
    messages = asked(f"{THOUGHT}I look.\n{CALL}\n{other}", "Both read.")
    tools: Any = TOOLS
    if stream:
        calls: dict[int, dict[str, str]] = {}
        for chunk in client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools, stream=True):
            for choice in chunk.choices:
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"name": "", "arguments": ""})
                    assert part.function is not None
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
        found = [(c["name"], json.loads(c["arguments"])) for c in calls.values()]
    else:
        answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content == "I look."
        made: Any = answer.choices[0].message.tool_calls
        found = [(c.function.name, json.loads(c.function.arguments)) for c in made]
    assert found == [("read", {"path": "a.py", "line": 3}), ("read", {"path": "b.py", "line": 3})]


def test_openai_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="gpt-4o", input=script("A response."))
    assert answer.output_text == "A response."
    text = ""
    for event in client.responses.create(model="gpt-4o", input=script("A streamed response."), stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == "A streamed response."


def test_anthropic_message_with_thinking_and_tool(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model="claude-local",
        max_tokens=500,
        messages=asked(f"{THOUGHT}I look.\n{CALL}"),
        tools=ANTHROPIC_TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use"]
    call: Any = message.content[-1]
    assert (call.name, call.input) == ("read", {"path": "a.py", "line": 3})
    assert message.stop_reason == "tool_use"


@pytest.mark.smoke
def test_anthropic_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="claude-local", max_tokens=500, messages=asked(f"{THOUGHT}I look.\n{CALL}"), tools=ANTHROPIC_TOOLS
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    call: Any = message.content[-1]
    assert call.input == {"path": "a.py", "line": 3}
    assert message.usage.output_tokens > 0


def test_anthropic_count_tokens(claude: anthropic.Anthropic, target: tuple[str, str], proxied: Live) -> None:
    if target[0] != proxied.url:
        pytest.skip("LiteLLM counts tokens itself")
    count = claude.messages.count_tokens(model="claude-local", messages=asked("Hello"), tools=ANTHROPIC_TOOLS)
    message = claude.messages.create(
        model="claude-local", max_tokens=50, messages=asked("Hello"), tools=ANTHROPIC_TOOLS
    )
    usage = message.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert count.input_tokens == usage.input_tokens + cached


def test_grammar_forces_json_and_a_tool(proxied: Live) -> None:
    with proxied.openai as client:
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
        answer = client.chat.completions.create(
            model="gpt-4o",
            messages=asked("not json at all"),
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}, "strict": True},
            },
        )
        assert isinstance(json.loads(answer.choices[0].message.content or "")["n"], int)
        tools: Any = TOOLS
        forced = client.chat.completions.create(
            model="gpt-4o", messages=asked("no call"), tools=tools, tool_choice="required", max_tokens=300
        )
        made: Any = forced.choices[0].message.tool_calls
        assert made[0].function.name in {"read", "edit", "run"}


def test_anthropic_system_and_history_through_both(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model="claude-local",
        max_tokens=500,
        system="Be the blue heron.",
        messages=[{"role": "user", "content": "[[find: blue heron]]"}],
    )
    block: Any = message.content[0]
    assert block.text.startswith("find: 1@0")


ADAPTED = [("tiny-base+titles", {}), ("tiny-base", {"adapter": "titles"})]
"""Both ways to name an adapter."""


@pytest.mark.parametrize(("model", "more"), ADAPTED)
def test_an_adapter_in_every_dialect(
    client: openai.OpenAI, claude: anthropic.Anthropic, model: str, more: dict[str, str]
) -> None:
    short: Any = {"model": model, "extra_body": {**more, "temperature": 0}}
    words: Any = [{"role": "user", "content": "what is new here"}]
    chat = client.chat.completions.create(**short, messages=words, max_tokens=3)
    stream = client.chat.completions.create(**short, messages=words, max_tokens=3, stream=True)
    pieces = [chunk.model for chunk in stream]
    text = client.completions.create(**short, prompt="what is new here", max_tokens=3)
    response = client.responses.create(**short, input="what is new here", max_output_tokens=3)
    message = claude.messages.create(**short, messages=words, max_tokens=3)
    answered = [chat.model, *pieces, text.model, response.model, message.model]
    assert {name.removeprefix("openai/") for name in answered} == {"tiny-base+titles"}


def test_an_adapter_changes_what_is_said_and_one_that_is_none_is_told(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    short: Any = {"model": "tiny-base", "max_tokens": 12, "messages": [{"role": "user", "content": "what is new here"}]}
    own = {"temperature": 0, "logit_bias": {"3": -100}}
    bare, adapted, again = (
        client.chat.completions.create(**short, extra_body=own | more).choices[0].message
        for more in ({}, {"adapter": "titles"}, {})
    )
    assert bare == again != adapted
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(**short, extra_body={"adapter": "nobody"})
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        claude.messages.create(**short, extra_body={"adapter": "nobody"})


@pytest.mark.usefixtures("needs_embeddings")
@pytest.mark.parametrize("model", ["tiny-encoder", "text-embedding-3-small"])
def test_openai_embeddings(client: openai.OpenAI, proxied: Live, model: str) -> None:
    texts, path = ["the cache", "a token"], Path(str(proxied.app.settings.embedding_model))
    reference = Reference(path)
    expected = [reference.text(text, 48) for text in texts]
    answer = client.embeddings.create(model=model, input=texts)  # base64 on the wire
    for item, vector in zip(answer.data, expected, strict=True):
        assert float(np.array(item.embedding) @ vector) > 0.9999
    assert answer.usage.prompt_tokens == sum(len(reference.tokenizer.encode(text).ids) for text in texts)
    plain = client.embeddings.create(model=model, input="the cache", encoding_format="float", dimensions=8)
    assert len(plain.data[0].embedding) == 8
    ids = reference.tokenizer.encode("the cache", add_special_tokens=False).ids
    for tokens in (ids, [ids], [ids, ids]):
        by_ids = client.embeddings.create(model=model, input=tokens)
        assert len(by_ids.data) == (2 if tokens == [ids, ids] else 1)
        for item in by_ids.data:
            assert float(np.array(item.embedding) @ expected[0]) > 0.9999


@pytest.mark.usefixtures("needs_embeddings")
def test_embeddings_on_the_wire(target: tuple[str, str]) -> None:
    """What the SDK hides: numbers are sent as they were asked for."""
    body = {"model": "tiny-encoder", "input": ["the cache", "a token"], "dimensions": 8}
    headers = {"authorization": f"Bearer {target[1]}"}

    def vectors(**more: str) -> list[Any]:
        answer = httpx.post(f"{target[0]}/v1/embeddings", json=body | more, headers=headers)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    packed, plain = vectors(encoding_format="base64"), vectors(encoding_format="float")
    for text, numbers in zip(packed, plain, strict=True):
        assert len(numbers) == 8
        assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), np.array(numbers, np.float32), atol=1e-6)


@pytest.mark.usefixtures("needs_embeddings")
def test_openai_embeddings_of_a_text_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reads at most 48"):
        client.embeddings.create(model="tiny-encoder", input=["a " * 200])


def test_openai_transcriptions(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"file": ("a.wav", wav(tone(1.0))), "language": "de", "prompt": "w7"}
    text = client.audio.transcriptions.create(**given, model="whisper-1").text
    assert text.startswith("w")
    told: Any = client.audio.transcriptions.create(**given, model="tiny-whisper", response_format="verbose_json")
    assert (told.text, told.language, told.duration) == (text, "de", 1.0)
    assert told.segments[0].start == 0.0
    plain = client.audio.transcriptions.create(**given, model="gpt-4o-transcribe", response_format="text")
    assert plain == f"{text}\n"
    for form, begins in (("srt", "1\n00:00:00,000 --> 00:00:0"), ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:0")):
        titled: Any = client.audio.transcriptions.create(**given, model="whisper-1", response_format=form)
        assert titled.startswith(begins) and " ".join(told.segments[0].text.split()) in titled
    with client.audio.transcriptions.with_streaming_response.create(
        **given, model="whisper-1", response_format="text"
    ) as streamed:
        assert "".join(streamed.iter_text()) == plain
    with pytest.raises(openai.BadRequestError, match="transcripts come as a whole"):
        client.audio.transcriptions.create(**given, model="whisper-1", stream=True)


def test_openai_transcriptions_of_what_is_no_recording(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this is no WAV, FLAC, MP3 or Ogg"):
        client.audio.transcriptions.create(model="tiny-whisper", file=("a.wav", b"not a sound at all"))


def test_openai_speech(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"voice": "alloy", "input": "Hello there."}
    sound = client.audio.speech.create(**given, model="tiny-voice", response_format="wav").read()
    assert look_at(sound, "file").rate == 32000
    begins = {"mp3": b"", "wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "pcm": b""}
    for form in SOUNDS:
        with client.audio.speech.with_streaming_response.create(
            **given, model="tts-1", response_format=form
        ) as streamed:
            assert streamed.headers["content-type"] == SOUNDS[form]
            content = b"".join(streamed.iter_bytes())
        assert content.startswith(begins[form]) and len(content) > 1000
        assert form in {"pcm", "opus"} or look_at(content, "file").frames > 0
    assert look_at(client.audio.speech.create(**given, model="tts-1-hd").read(), "file").frames > 0  # MP3, as OpenAI's
    with pytest.raises(openai.BadRequestError, match="speed=2"):
        client.audio.speech.create(**given, model="tts-1", speed=2.0)
