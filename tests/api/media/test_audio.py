"""``/v1/audio/...``: forms in, transcripts out; texts in, sounds out; around a scripted model."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from start_llm.api.server import ApiServer
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.events import Progress
from start_llm.core.limits import FORM_PARTS, FORM_VALUE
from start_llm.core.media import AudioTask, Computation, Hints, Transcript, TranscriptSegment
from tests.api.conftest import Serve

SAID = Transcript(
    " Hello there. And --> more.",
    "en",
    3.25,
    (
        TranscriptSegment(0, 0.0, 1.5, " Hello there.", (50364, 5, 50439), 0.0, -0.25, 1.1, 0.01),
        TranscriptSegment(0, 1.5, 1.5, "", (), 0.0, -0.25, 1.1, 0.01),
        TranscriptSegment(0, 1.5, 3661.004, " And --> more.", (50439, 6, 50500), 0.2, math.nan, 1.2, math.nan),
    ),
)
SOUND = b"RIFF or whatever"
PATH = "/v1/audio/transcriptions"


def computed(result: Any, bad: str) -> Computation[Any]:
    yield Progress(0, 3)
    if bad:
        raise BadRequest(bad, param="file")
    yield Progress(3, 3)
    return result


class FakeAudio:
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.bad = ""
        self.threads: set[int] = set()

    def named(self, asked: str, task: AudioTask) -> str:
        return asked or "tiny-whisper"

    def transcribe(self, model: str, file: bytes, hints: Hints) -> Computation[Any]:
        self.threads.add(threading.get_ident())
        self.asked.append((model, file, hints))
        return computed(SAID, self.bad)

    def speak(self, model: str, text: str, form: str) -> Computation[Any]:
        self.asked.append((model, text, form))
        return computed(f"{form} of {text}".encode(), self.bad)


@pytest.fixture
def audio() -> FakeAudio:
    return FakeAudio()


@pytest.fixture
def server(audio: FakeAudio, serve: Serve) -> ApiServer:
    return serve({"audio": audio})


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(server: ApiServer) -> Ask:
    def asked(**fields: Any) -> httpx.Response:
        files = {"file": ("a.wav", SOUND, "audio/wav")}
        return httpx.post(server.url + PATH, files=files, data=fields)

    return asked


@pytest.fixture
def send(server: ApiServer) -> Callable[..., httpx.Response]:
    """A body as it is."""

    def sent(body: bytes, kind: str = "multipart/form-data; boundary=xx") -> httpx.Response:
        return httpx.post(server.url + PATH, content=body, headers={"Content-Type": kind})

    return sent


def part(name: str, value: bytes, *, file: bool = False, more: bytes = b"") -> bytes:
    named = b'; filename="a"' if file else b""
    return b'--xx\r\nContent-Disposition: form-data; name="%b"%b\r\n%b\r\n%b\r\n' % (name.encode(), named, more, value)


def test_a_transcript_as_json(ask: Ask, audio: FakeAudio) -> None:
    answer = ask(model="m", language="de", prompt="Names: Ann", temperature="0.5", response_format="json")
    assert answer.json() == {"text": "Hello there. And --> more.", "usage": {"type": "duration", "seconds": 4}}
    assert audio.asked == [("m", SOUND, Hints("de", "Names: Ann", 0.5))]
    assert answer.headers["x-request-id"].startswith("transcription-")
    assert ask().json()["text"]
    assert audio.asked[1] == ("tiny-whisper", SOUND, Hints())


def test_a_transcript_with_its_segments(ask: Ask) -> None:
    body = ask(response_format="verbose_json", **{"timestamp_granularities[]": "segment"}).json()
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "en", 3.25)
    assert [segment["id"] for segment in body["segments"]] == [0, 1, 2]
    assert body["segments"][0] == {
        "id": 0, "seek": 0, "start": 0.0, "end": 1.5, "text": " Hello there.", "tokens": [50364, 5, 50439],
        "temperature": 0.0, "avg_logprob": -0.25, "compression_ratio": 1.1, "no_speech_prob": 0.01,
    }  # fmt: skip
    assert body["segments"][2]["avg_logprob"] == 0.0  # what is not known: JSON has no NaN


def test_subtitles(ask: Ask) -> None:
    text, srt, vtt = (ask(response_format=kind) for kind in ("text", "srt", "vtt"))
    assert text.text == "Hello there. And --> more.\n"
    assert text.headers["content-type"].startswith("text/plain")
    assert srt.text == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n00:00:01,500 --> 01:01:01,004\nAnd -> more.\n"
    )
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "docx"}, "response_format"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"stream": "true"}, "stream"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        ({"model": "m" * 600}, "model"),
        ({"language": ["de", "en"]}, "language"),
    ],
)
def test_a_bad_field_is_named(ask: Ask, fields: Any, param: str) -> None:
    answer = ask(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_the_model_finds_wrong_with_the_recording_is_the_answer(ask: Ask, audio: FakeAudio) -> None:
    audio.bad = "file: this is no audio."
    answer = ask()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    audio.named = Mock(side_effect=NotSupported("Install it", code="extra_not_installed"))  # type: ignore[method-assign]
    answer = ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "extra_not_installed")


END = b"--xx--\r\n"
FORMS = {
    "a good one": (part("file", SOUND, file=True) + END, 200, ""),
    "no end": (part("file", SOUND, file=True), 400, "has no end"),
    "nothing": (b"", 400, "has no end"),
    "no form": (b'{"model": "x"}', 400, "no form that can be read"),
    "another boundary": (part("file", SOUND, file=True).replace(b"xx", b"yy") + b"--yy--\r\n", 400, "no form"),
    "no file": (part("model", b"m") + END, 400, "file: this field is required"),
    "a file without a filename": (part("file", SOUND) + END, 400, "this must be a file"),
    "two files": (part("file", SOUND, file=True) * 2 + END, 400, "send one file, not 2"),
    "no name": (b"--xx\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END, 400, "Field name not found"),
    "no headers": (b"--xx\r\n\r\nx\r\n" + END, 400, "Field name not found"),
    "thousands of parts": (part("a", b"b") * 5000 + END, 400, f"more than {FORM_PARTS.most} parts"),
    "a header of a megabyte": (part("file", SOUND, more=b"X: " + b"y" * 2**20 + b"\r\n") + END, 400, "header"),
    "a thousand headers": (part("file", SOUND, file=True, more=b"X: y\r\n" * 1000) + END, 400, "header"),
    "a name of a megabyte": (part("n" * 2**20, b"x") + END, 400, "header"),
    "a field of a megabyte": (part("prompt", b"p" * 2**20) + END, 400, f"more than {FORM_VALUE.most:,} bytes"),
    "bytes that are no text": (part("prompt", b"\xff\xfe") + part("file", SOUND, file=True) + END, 400, "no form"),
    "a name that is no text": (part("file", SOUND, file=True).replace(b"file", b"\xff\xfe\xfd\xfc", 1) + END, 400, ""),
    "a boundary that begins again and again": (b"--xx\r\n" * 100_000, 400, ""),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, send: Callable[..., httpx.Response], audio: FakeAudio) -> None:
    body, status, said = FORMS[name]
    answer = send(body)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert said in answer.json()["error"]["message"]
        assert not audio.asked


def test_a_large_file_is_taken_as_it_is(send: Callable[..., httpx.Response], audio: FakeAudio) -> None:
    sound = b"\r\n--x\r\n--xy" * 500_000
    assert send(part("file", sound, file=True) + END).status_code == 200
    assert audio.asked[0][1] == sound


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        ("multipart/form-data; boundary=" + "b" * 300, 400),
        ("application/json", 415),
        ("multipart/mixed; boundary=xx", 415),
        ("", 415),
    ],
)
def test_content_types(kind: str, status: int, send: Callable[..., httpx.Response]) -> None:
    assert send(part("file", SOUND, file=True) + END, kind).status_code == status


def test_forms_are_read_on_this_route_only(server: ApiServer) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=xx"}
    body = part("model", b"m") + END
    for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/messages"):
        assert httpx.post(server.url + path, content=body, headers=kind).status_code == 415
    for origin in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert httpx.post(server.url + PATH, content=body, headers=kind | origin).status_code in {403, 415}


def test_speech(server: ApiServer, audio: FakeAudio) -> None:
    url = server.url + "/v1/audio/speech"
    answer = httpx.post(url, json={"model": "tts-1", "input": "Hello", "voice": "alloy"})
    assert (answer.content, answer.headers["content-type"]) == (b"mp3 of Hello", "audio/mpeg")
    assert answer.headers["x-request-id"].startswith("speech-")
    wav = httpx.post(url, json={"input": "Hello", "response_format": "wav", "speed": 1})
    assert (wav.content, wav.headers["content-type"]) == (b"wav of Hello", "audio/wav")
    assert audio.asked == [("tts-1", "Hello", "mp3"), ("tiny-whisper", "Hello", "wav")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "  \n "}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"input": "x", "response_format": "aac"}, "response_format"),
        ({"input": "x", "speed": 1.5}, "speed"),
        ({"input": "x", "speed": 100}, "speed"),
        ({"input": "x", "stream_format": "sse"}, "stream_format"),
        ({"input": "x", "model": 5}, "model"),
    ],
)
def test_a_bad_request_for_speech_names_its_field(server: ApiServer, audio: FakeAudio, body: Any, param: str) -> None:
    answer = httpx.post(server.url + "/v1/audio/speech", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not audio.asked
