"""The official OpenAI and Anthropic clients against the real server, directly and through the proxy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.smoke
def test_anthropic_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="claude-local",
        max_tokens=500,
        messages=asked(f"{THOUGHT}I look.\n{CALL}"),
        tools=ANTHROPIC_TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    call: Any = message.content[-1]
    assert call.input == {"path": "a.py", "line": 3}
    assert message.usage.output_tokens > 0


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
