"""FALLBACK_MODEL: the server's own HTTP edge refuses, the real LiteLLM is in front, and a stub plays the provider.

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

from start_llm.api.server import ApiServer
from start_llm.core.errors import NOT_LOADABLE
from start_llm.core.settings import Settings, load_settings
from start_llm.proxy import config
from start_llm.proxy.keeper import ProxyKeeper
from start_llm.proxy.launcher import LiteLLMProxy
from tests.api.fakes import make_server
from tests.proxy.scripted import REASONS, Scripted, Sounds, Vectors, error_of
from tests.proxy.stub import CARD, TEXT, StubServer
from tests.waiting import until

START_SECONDS = 360.0  # LiteLLM computes for 8 s; on a machine with busy neighbours that may take minutes
pytestmark = [pytest.mark.timeout(400), pytest.mark.thorough]

KEY = "cloud-key-that-nobody-may-log"
MODEL = "openai/cloud"
HEADER = "x-start-llm-fallback"
DIALECTS = ["chat/completions", "messages", "responses"]


@pytest.fixture(scope="module")
def cloud() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """A provider that failed in one test is asked again in the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "COOLDOWN_SECONDS", 0.0)
        patch.setattr(config, "RETRIES", 1)
        yield


@pytest.fixture(scope="module")
def settings(cloud: StubServer, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("fallback")
    return load_settings(
        None,
        mlx_port=0,
        proxy_port=0,
        start_llm_cache_dir=folder / "cache",
        log_root=folder,
        api_key="server-key",
        sse_ping_seconds=4.0,  # a busy machine refuses after a second or two, and the head of a stream is out then
        fallback_model=MODEL,
        fallback_api_key=KEY,
        fallback_api_base=f"{cloud.url}/v1",
    )


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def sounds() -> Sounds:
    return Sounds()


@pytest.fixture(scope="module")
def engine(settings: Settings, scripted: Scripted, sounds: Sounds) -> Iterator[ApiServer]:
    server = make_server(settings, scripted.service, audio=sounds, encoders=Vectors())
    server.start()
    yield server
    server.stop(0)


@pytest.fixture(scope="module")
def proxy(settings: Settings, engine: ApiServer, quick: None) -> Iterator[LiteLLMProxy]:
    log = settings.log_root / "proxy.log"
    env = settings.log_root / ".env"
    proxy = LiteLLMProxy(settings, server_url=engine.url, model_id="tiny", card=CARD, log_path=log, env_file=env)
    proxy.start()
    try:
        assert proxy.wait_ready(START_SECONDS), proxy.log_tail()
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture(scope="module")
def web(proxy: LiteLLMProxy) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {proxy.master_key}"}
    with httpx.Client(base_url=f"{proxy.url}/v1/", headers=headers, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def clean(cloud: StubServer, scripted: Scripted) -> Iterator[None]:
    yield
    cloud.seen.clear()
    cloud.fails.clear()
    scripted.go.clear()


def body_of(dialect: str, text: str, **more: Any) -> dict[str, Any]:
    if dialect == "responses":
        return {"model": "tiny", "input": [{"role": "user", "content": text}], **more}
    if dialect == "completions":
        return {"model": "tiny", "prompt": text, **more}
    return {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": text}], **more}


def sentence(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_goes_to_the_fallback_and_the_answer_says_so(
    web: httpx.Client, cloud: StubServer, reason: str, dialect: str, stream: bool
) -> None:
    given = web.post(dialect, json=body_of(dialect, f"say {reason}", stream=stream))
    assert given.status_code == 200, given.text
    said = given.headers.get(HEADER) or given.text.partition(f": {HEADER}: ")[2].partition("\n")[0]
    assert said == f"{MODEL}; {reason}"
    assert TEXT in given.text and "From here" not in given.text
    assert len(cloud.seen) == 1
    seen = cloud.seen[0]
    assert seen.headers["authorization"] == f"Bearer {KEY}" and seen.body["model"] == "cloud"
    assert f"say {reason}" in json.dumps(seen.body)
    everything = json.dumps([seen.headers, seen.body])
    assert "server-key" not in everything and web.headers["authorization"].split()[1] not in everything


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("word", ["bad", "forbidden", "unknown", "internal", "unavailable"])
def test_other_errors_stay_here(web: httpx.Client, cloud: StubServer, word: str, dialect: str) -> None:
    for stream in (False, True):
        given = web.post(dialect, json=body_of(dialect, f"say {word}", stream=stream))
        assert given.status_code == error_of(word).status
        assert error_of(word).message.split(".")[0] in sentence(given) and HEADER not in given.headers
    assert cloud.seen == []


def test_a_body_that_is_none_and_a_model_that_is_none_stay_here(web: httpx.Client, cloud: StubServer) -> None:
    assert web.post("chat/completions", content=b"{").status_code == 400
    assert web.post("chat/completions", json={"model": "tiny"}).status_code in {400, 422}
    assert web.post("messages", json=body_of("messages", "say unknown") | {"model": "other"}).status_code == 404
    assert cloud.seen == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_can_be_answered_is_answered_here(web: httpx.Client, cloud: StubServer, dialect: str) -> None:
    for stream in (False, True):
        given = web.post(dialect, json=body_of(dialect, "hello", stream=stream))
        assert given.status_code == 200 and "From here" in given.text and HEADER not in given.headers
    assert cloud.seen == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_can_forbid_it(web: httpx.Client, cloud: StubServer, dialect: str) -> None:
    asked = body_of(dialect, "say queue_full")
    for body, headers in ((asked, {HEADER: "off"}), (asked, {HEADER: "No"}), (asked | {"disable_fallbacks": True}, {})):
        for stream in (False, True):
            given = web.post(dialect, json=body | {"stream": stream}, headers=headers)
            assert given.status_code == 429 and "running or waiting already" in sentence(given), given.text
            assert HEADER not in given.headers
    assert cloud.seen == []


def test_a_request_that_leans_on_a_stored_answer_stays_here(web: httpx.Client, cloud: StubServer) -> None:
    """Nobody else has it."""
    kept = web.post("responses", json=body_of("responses", "hello")).json()["id"]
    given = web.post("responses", json=body_of("responses", "say queue_full", previous_response_id=kept))
    assert given.status_code == 429 and cloud.seen == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_was_refused_after_a_wait_goes_on_elsewhere(
    web: httpx.Client, cloud: StubServer, scripted: Scripted, dialect: str
) -> None:
    """The client has the head and signs of life by then, so the stream itself says where it comes from."""
    with web.stream("POST", dialect, json=body_of(dialect, "late queue_full", stream=True)) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        assert next(lines).startswith((": ping", "event: ping"))
        scripted.go.set()
        rest = list(lines)
    assert f": {HEADER}: {MODEL}; queue_full" in rest
    assert TEXT in "".join(rest) and "error" not in "".join(rest) and len(cloud.seen) == 1


def fails_everywhere(web: httpx.Client, dialect: str, stream: bool) -> None:
    given = web.post(dialect, json=body_of(dialect, "say queue_full", stream=stream))
    assert given.status_code == 429 and "running or waiting already" in sentence(given)
    assert given.headers[HEADER] == f"{MODEL}; queue_full; failed"
    assert "The cloud is out" not in given.text and "Traceback" not in given.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_servers_own_error_comes_back_if_the_fallback_fails(
    web: httpx.Client, proxy: LiteLLMProxy, cloud: StubServer, dialect: str, stream: bool
) -> None:
    cloud.fails[:] = [400]
    failed = proxy.sent().failed
    fails_everywhere(web, dialect, stream)
    assert len(cloud.seen) == 1
    until(lambda: proxy.sent().failed == failed + 1)
    assert KEY not in proxy.log_path.read_text()


@pytest.mark.parametrize("status", [401, 500])
def test_a_wrong_key_and_a_provider_that_is_down_end_the_same_way(
    web: httpx.Client, proxy: LiteLLMProxy, cloud: StubServer, status: int
) -> None:
    cloud.fails[:] = [status]
    fails_everywhere(web, "chat/completions", False)
    assert len(cloud.seen) == (1 if status == 401 else 2), "LiteLLM tries again what may pass"
    assert KEY not in proxy.log_path.read_text()


@pytest.mark.parametrize("word", ["queue_full", "internal"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_nobody_can_answer_ends_with_the_servers_own_error(
    web: httpx.Client, cloud: StubServer, scripted: Scripted, dialect: str, word: str
) -> None:
    """In the words and the form that the server itself writes; LiteLLM has one form and sometimes none of the words."""
    cloud.fails[:] = [400]
    with web.stream("POST", dialect, json=body_of(dialect, f"late {word}", stream=True)) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith((": ping", "event: ping"))
        scripted.go.set()
        rest = list(lines)
    assert (f": {HEADER}: {MODEL}; queue_full; failed" in rest) is (word == "queue_full")
    assert len(cloud.seen) == (word == "queue_full")
    data = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
    kind = {"chat/completions": None, "messages": "error", "responses": "response.failed"}[dialect]
    assert data[-1].get("type") == kind and (kind is None or f"event: {kind}" in rest)
    assert (data[-1].get("response") or data[-1])["error"]["message"] == error_of(word).message


@pytest.mark.parametrize("dialect", [*DIALECTS, "completions"])
def test_who_forbids_it_is_told_the_servers_error_after_a_wait_too(
    web: httpx.Client, cloud: StubServer, scripted: Scripted, dialect: str
) -> None:
    """Plain completions never go elsewhere."""
    off = {} if dialect == "completions" else {HEADER: "off"}
    with web.stream("POST", dialect, json=body_of(dialect, "late queue_full", stream=True), headers=off) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith((": ping", "event: ping"))
        scripted.go.set()
        rest = "".join(lines)
    assert error_of("queue_full").message in rest and HEADER not in rest and cloud.seen == []


def test_who_is_to_come_back_later_is_not_waited_for(web: httpx.Client, cloud: StubServer) -> None:
    cloud.fails[:] = [429]
    fails_everywhere(web, "messages", False)
    assert len(cloud.seen) == 1


def test_litellm_tries_again_what_may_pass(web: httpx.Client, cloud: StubServer) -> None:
    cloud.fails[:] = [503, 0]
    given = web.post("chat/completions", json=body_of("chat/completions", "say queue_full"))
    assert given.status_code == 200 and TEXT in given.text and len(cloud.seen) == 2


def test_it_cannot_be_asked_for_by_name(web: httpx.Client, cloud: StubServer) -> None:
    """What goes there is told in a header and counted; and it costs money."""
    name = f"fallback:{MODEL}"
    assert name not in web.get("models").text and name not in web.get("model/info").text
    for dialect in DIALECTS:
        given = web.post(dialect, json=body_of(dialect, "say queue_full") | {"model": name})
        assert given.status_code == 404 and "cannot be asked for" in sentence(given), given.text
        for changed in ({"fallbacks": [name]}, {"context_window_fallbacks": [{"tiny": [name]}]}):
            given = web.post(dialect, json=body_of(dialect, "say queue_full") | changed)
            assert given.status_code == 400 and next(iter(changed)) in sentence(given), given.text
    assert cloud.seen == []


def test_what_was_sent_is_counted_and_told(
    web: httpx.Client, proxy: LiteLLMProxy, cloud: StubServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = proxy.sent()
    assert web.post("messages", json=body_of("messages", "say out_of_memory")).status_code == 200
    until(lambda: proxy.sent().total == before.total + 1)
    sent = proxy.sent()
    assert sent.reason == "out_of_memory" and sent.ok
    keeper = ProxyKeeper(proxy, say=lambda line: None, fallback=MODEL)
    assert keeper.figures()["fallbacks_out_of_memory"] == sent.counts["out_of_memory"]
    keeper.start(announced=True)
    until(lambda: "out_of_memory" in caplog.text)
    keeper.stop()
    assert f"FALLBACK_MODEL={MODEL}" in caplog.text


def test_a_client_that_goes_while_it_waits_ends_its_request(
    web: httpx.Client, cloud: StubServer, scripted: Scripted
) -> None:
    while not scripted.service.streams.empty():
        scripted.service.streams.get()
    with web.stream("POST", "messages", json=body_of("messages", "late queue_full", stream=True)) as stream:
        assert next(stream.iter_lines()).startswith((": ping", "event: ping"))
        waits = scripted.service.streams.get(timeout=60)
    until(waits.closed.is_set)
    assert cloud.seen == []


def test_what_is_of_this_server_stays_here(web: httpx.Client, cloud: StubServer) -> None:
    body = body_of("chat/completions", "say queue_full", min_p=0.1, top_k=5, chat_template_kwargs={"a": 1})
    body["messages"].insert(0, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"})
    assert web.post("chat/completions", json=body).status_code == 200
    assert not {"min_p", "top_k", "chat_template_kwargs"} & set(cloud.seen[0].body)
    assert "reasoning_content" not in json.dumps(cloud.seen[0].body)


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
def test_voices_and_texts_for_vectors_stay_here_and_are_answered(
    web: httpx.Client, cloud: StubServer, ask: Any, model: str
) -> None:
    """A chat model could not answer them, and nobody has agreed that they may leave the machine."""
    for reason in REASONS:
        refused = ask(web, model, reason)
        assert refused.status_code == STATUS[reason], refused.text
        assert error_of(reason).message in sentence(refused) and HEADER not in refused.headers
    answered = ask(web, model, "north")
    assert answered.status_code == 200 and HEADER not in answered.headers, answered.text
    elsewhere_asked = ask(web, f"fallback:{MODEL}", "queue_full")
    assert elsewhere_asked.status_code >= 400
    assert cloud.seen == []


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


def test_who_goes_while_a_text_is_spoken_ends_it(proxy: LiteLLMProxy, sounds: Sounds) -> None:
    web = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=60)
    body, key = json.dumps({"model": "tts-1", "input": "wait"}), f"Bearer {proxy.master_key}"
    web.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json", "Authorization": key})
    assert sounds.begun.wait(60)
    web.close()
    assert sounds.left.wait(60)
