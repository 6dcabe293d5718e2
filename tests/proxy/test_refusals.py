"""What the server refuses, and sounds: its own HTTP edge, with the real LiteLLM in front.

These tests fail when a LiteLLM update changes what `start_llm/proxy/balancer.py` relies on.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from start_llm.core.errors import NOT_LOADABLE
from start_llm.core.settings import load_settings
from start_llm.proxy.launcher import LiteLLMProxy
from tests.api.fakes import make_server
from tests.proxy.real_proxy import DIALECTS, body_of, client_of, in_front_of
from tests.proxy.scripted import REASONS, Scripted, Sounds, Vectors, error_of
from tests.waiting import until

pytestmark = [pytest.mark.timeout(400), pytest.mark.thorough]

SCRIPTED, SOUNDS = Scripted(), Sounds()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLLMProxy]:
    folder = tmp_path_factory.mktemp("refusals")
    given = {"start_llm_cache_dir": folder / "cache", "log_root": folder, "api_key": "server-key"}
    # A busy machine refuses after a second or two, and the head of a stream is out then.
    settings = load_settings(None, mlx_port=0, proxy_port=0, sse_ping_seconds=4.0, **given)
    server = make_server(settings, SCRIPTED.service, audio=SOUNDS, encoders=Vectors())
    with in_front_of(server, settings, folder) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def web(proxy: LiteLLMProxy) -> Iterator[httpx.Client]:
    with client_of(proxy) as client:
        yield client


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    SCRIPTED.go.clear()


def sentence(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("word", [*REASONS, "bad", "forbidden", "unknown", "internal", "unavailable"])
def test_the_servers_errors_pass_litellm_as_they_are(web: httpx.Client, word: str, dialect: str) -> None:
    given = web.post(dialect, json=body_of(dialect, f"say {word}"))
    assert given.status_code == error_of(word).status
    words = (error_of(word).message.split(".")[0], "prompt is too long: 9000 tokens > 8192 maximum")  # as Anthropic's
    assert any(each in sentence(given) for each in words)


def test_a_body_that_is_none_and_a_model_that_is_none_are_refused(web: httpx.Client) -> None:
    assert web.post("chat/completions", content=b"{").status_code == 400
    assert web.post("chat/completions", json={"model": "tiny"}).status_code in {400, 422}
    assert web.post("messages", json=body_of("messages", "say unknown") | {"model": "other"}).status_code == 404


@pytest.mark.parametrize("word", ["queue_full", "internal"])
def test_a_stream_of_messages_ends_with_the_servers_own_error(web: httpx.Client, word: str) -> None:
    with web.stream("POST", "messages", json=body_of("messages", f"late {word}", stream=True)) as stream:
        lines = stream.iter_lines()
        next(lines)
        SCRIPTED.go.set()
        rest = list(lines)
    data = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
    assert data[-1]["type"] == "error" and "event: error" in rest
    assert data[-1]["error"]["message"] == error_of(word).message


def test_a_client_that_goes_while_it_waits_ends_its_request(web: httpx.Client) -> None:
    while not SCRIPTED.service.streams.empty():
        SCRIPTED.service.streams.get()
    with web.stream("POST", "messages", json=body_of("messages", "late queue_full", stream=True)) as stream:
        assert next(stream.iter_lines()).startswith((": ping", "event: ping"))
        waits = SCRIPTED.service.streams.get(timeout=60)
    until(waits.closed.is_set)


def hear(web: httpx.Client, model: str, prompt: str, **more: str) -> httpx.Response:
    files = {"file": ("a.wav", b"RIFF or whatever", "audio/wav")}
    return web.post("audio/transcriptions", files=files, data={"model": model, "prompt": prompt, **more})


def speak(web: httpx.Client, model: str, text: str) -> httpx.Response:
    return web.post("audio/speech", json={"model": model, "input": text, "voice": "alloy"})


def embed(web: httpx.Client, model: str, text: str) -> httpx.Response:
    return web.post("embeddings", json={"model": model, "input": [text]})


OTHERS = [(hear, "tiny-whisper"), (hear, "nobody-knows-it"), (speak, "tiny-voice"), (speak, "nobody-knows-it")]
OTHERS += [(embed, "tiny-encoder"), (embed, "nobody-knows-it")]
STATUS = {"queue_full": 429, "out_of_memory": 507, "context_length_exceeded": 400, NOT_LOADABLE: 500}


@pytest.mark.parametrize(("ask", "model"), OTHERS)
def test_voices_and_texts_for_vectors_are_answered_or_refused_by_the_server(
    web: httpx.Client, ask: Any, model: str
) -> None:
    for reason in REASONS:
        refused = ask(web, model, reason)
        assert refused.status_code == STATUS[reason], refused.text
        assert error_of(reason).message in sentence(refused)
    answered = ask(web, model, "north")
    assert answered.status_code == 200, answered.text


def test_a_transcript_comes_in_the_form_that_was_asked_for(web: httpx.Client) -> None:
    assert hear(web, "whisper-1", "").json()["usage"] == {"type": "duration", "seconds": 4}
    for form, begins in (("text", "Hello there."), ("srt", "1\n00:00:00,000 --> "), ("vtt", "WEBVTT\n\n00:00:00.000")):
        given = hear(web, "whisper-1", "", response_format=form)
        assert given.text.startswith(begins) and given.headers["content-type"].startswith("text/plain")
    spoken = speak(web, "tts-1", "Hello.")
    assert spoken.content == b"mp3 of Hello." and spoken.headers["content-type"] == "audio/mpeg"
    assert spoken.headers["x-request-id"].startswith("speech-")


def test_a_form_that_is_none_gets_the_servers_sentence(web: httpx.Client) -> None:
    for body, kind in ((b"{}", "application/json"), (b"nothing", "multipart/form-data; boundary=x")):
        refused = web.post("audio/transcriptions", content=body, headers={"content-type": kind})
        assert 400 <= refused.status_code < 500 and sentence(refused)


def test_who_goes_while_a_text_is_spoken_ends_it(proxy: LiteLLMProxy) -> None:
    web = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=60)
    body, key = json.dumps({"model": "tts-1", "input": "wait"}), f"Bearer {proxy.master_key}"
    web.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json", "Authorization": key})
    assert SOUNDS.begun.wait(60)
    web.close()
    assert SOUNDS.left.wait(60)
