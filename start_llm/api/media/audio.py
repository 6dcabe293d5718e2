"""``POST /v1/audio/transcriptions`` and ``POST /v1/audio/speech``, OpenAI's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field as FormField
from python_multipart.multipart import File, FormParser, parse_options_header

from start_llm.api.common.dialect import Task
from start_llm.api.common.fields import BodyModel, ModelName, parse_body, validate, within, wrong
from start_llm.api.common.request import counted_request
from start_llm.api.common.shapes import shape_of
from start_llm.api.http import sse
from start_llm.api.http.access import MULTIPART, RequestOwners
from start_llm.api.http.routes import Reply, Request
from start_llm.audio.service import AudioService
from start_llm.core.errors import BadRequest
from start_llm.core.limits import FORM_HEADER, FORM_PARTS, FORM_VALUE, MODEL, SPOKEN_TEXT
from start_llm.core.media import Hints, SoundForm, Transcript, TranscriptSegment

PIECE = 1 << 20
PLAIN = "text/plain; charset=utf-8"
SOUNDS = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "pcm": "audio/pcm",
}
GRANULARITY = "timestamp_granularities[]"
Shape = Literal["json", "text", "verbose_json", "srt", "vtt"]


class TranscriptionBody(BodyModel):
    model: ModelName = ""
    language: str | None = None
    prompt: str = ""
    response_format: Shape = "json"
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=False)] = 0.0
    user: str | None = None


class SpeechBody(BodyModel):
    model: ModelName | None = None
    input: str
    voice: Any = None
    response_format: SoundForm | None = None
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    stream_format: Literal["audio"] | None = None
    user: str | None = None


if TYPE_CHECKING:
    HeardSegmentShape = dict[str, Any]
else:
    HeardSegmentShape = shape_of("HeardSegmentShape", TranscriptSegment, id=int)


class HeardSecondsShape(TypedDict):
    type: Literal["duration"]
    seconds: int


class TranscriptShape(TypedDict):
    """All but ``text`` and ``usage`` only with ``response_format=verbose_json``."""

    text: str
    usage: HeardSecondsShape
    task: NotRequired[Literal["transcribe"]]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[HeardSegmentShape]]


@dataclass(frozen=True, slots=True)
class AudioRoutes:
    """Handlers."""

    audio: AudioService
    owners: RequestOwners

    def transcriptions(self, inbound: Request) -> Task:
        form = read_form(inbound.body, inbound.headers.get("Content-Type", ""))
        body = _read(form)
        file = form.file("file")
        request = counted_request(
            "transcription", self.audio.named(body.model, "transcription"), {"user": body.user}, inbound, self.owners
        )
        hints = Hints(body.language or None, body.prompt, body.temperature)
        hearing = self.audio.transcribe(request.model, file, hints)
        return Task(request, hearing, lambda found: _transcript(found, body.response_format))

    def speech(self, inbound: Request) -> Task:
        body, data = parse_body(SpeechBody, inbound.body)
        within(SPOKEN_TEXT, len(body.input), "input")
        if not body.input.strip():
            raise wrong("input", "there is nothing to be spoken.")
        if body.speed not in {None, 1.0}:
            raise BadRequest(
                f"speed={body.speed:g}: the models served here speak at their own speed; leave it out.",
                param="speed",
                code="invalid_value",
            )
        request = counted_request("speech", self.audio.named(body.model or "", "speech"), data, inbound, self.owners)
        form = body.response_format or "mp3"
        speaking = self.audio.speak(request.model, body.input, form)
        return Task(request, speaking, lambda sound: Reply(sound, content_type=SOUNDS[form]))


def _read(form: Form) -> TranscriptionBody:
    """The fields that are no files. Raises BadRequest."""
    if form.value("stream") not in {None, "", "false", "False", "0"}:
        raise wrong("stream", "transcripts come as a whole; leave it out.")
    odd = [*form.all(GRANULARITY, str), *form.all(GRANULARITY[:-2], str)]
    if any(kind != "segment" for kind in odd):
        raise BadRequest(
            f"{GRANULARITY}={odd[0][:40]!r}: only 'segment' is known here.", param=GRANULARITY, code="invalid_value"
        )
    given: dict[str, Any] = {name: form.value(name) for name in TranscriptionBody.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    within(MODEL, len(given.get("model", "")), "model")
    return validate(TranscriptionBody, given)


def _transcript(found: Transcript, shape: Shape) -> Reply:
    if shape in _TEXTS:
        return Reply(_TEXTS[shape](found).encode("utf-8", "replace"), content_type=PLAIN)
    used: HeardSecondsShape = {"type": "duration", "seconds": math.ceil(found.seconds)}
    body: TranscriptShape = {"text": found.text.strip(), "usage": used}
    if shape == "verbose_json":
        body = {
            "task": "transcribe",
            "language": found.language,
            "duration": round(found.seconds, 3),
            "text": body["text"],
            "segments": [_shown(index, segment) for index, segment in enumerate(found.segments)],
            "usage": used,
        }
    return Reply(sse.dumps(body))


def _shown(index: int, segment: TranscriptSegment) -> dict[str, Any]:
    values = {name: _known(value) for name, value in asdict(segment).items()}
    return {"id": index, **values, "start": round(segment.start, 3), "end": round(segment.end, 3)}


def _known(value: Any) -> Any:
    """JSON has no NaN."""
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


def _cues(found: Transcript, point: str) -> list[str]:
    """Times and text of each segment. An arrow in a text would begin another cue's times."""
    return [
        f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n"
        f"{' '.join(segment.text.split()).replace('-->', '->')}\n"
        for segment in found.segments
        if segment.text.strip()
    ]


def _clock(seconds: float, point: str) -> str:
    """``01:02:03.004``."""
    thousandths = round(seconds * 1000)
    minutes, milliseconds = divmod(thousandths, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"


_TEXTS: dict[str, Callable[[Transcript], str]] = {
    "text": lambda found: found.text.strip() + "\n",
    "srt": lambda found: "\n".join(f"{number}\n{cue}" for number, cue in enumerate(_cues(found, ","), start=1)),
    "vtt": lambda found: "\n".join(["WEBVTT\n", *_cues(found, ".")]),
}


# --- forms with files, read by python-multipart and bounded: parts, headers, values ---


@dataclass(slots=True)
class Form:
    """What came under each name, in its order: values of fields as text, files as bytes."""

    parts: dict[str, list[str | bytes]] = field(default_factory=dict)

    def add(self, part: FormField | File) -> None:
        """Raises BadRequest: it is too long, or there are too many."""
        if sum(map(len, self.parts.values())) >= FORM_PARTS.most:
            raise BadRequest(f"The form has more than {FORM_PARTS.most} parts.", code="limit_exceeded")
        name = (part.field_name or b"").decode()
        if isinstance(part, File):
            part.file_object.seek(0)
            value: str | bytes = part.file_object.read()
        elif len(part.value or b"") > FORM_VALUE.most:
            raise wrong(name, f"more than {FORM_VALUE.most:,} bytes.", "limit_exceeded")
        else:
            value = (part.value or b"").decode()
        self.parts.setdefault(name, []).append(value)

    def all[V: (str, bytes)](self, name: str, kind: type[V]) -> list[V]:
        return [value for value in self.parts.get(name, []) if isinstance(value, kind)]

    def value(self, name: str) -> str | None:
        """Raises BadRequest: it is there more than once."""
        found = self.all(name, str)
        if len(found) > 1:
            raise wrong(name, f"this field is there {len(found)} times.")
        return found[0] if found else None

    def file(self, name: str) -> bytes:
        """Raises BadRequest: it is missing, no file, or there more than once."""
        found = self.all(name, bytes)
        if len(found) == 1:
            return found[0]
        if not self.parts.get(name):
            raise wrong(name, "this field is required.", "missing_field")
        if found:
            raise wrong(name, f"send one file, not {len(found)}.")
        raise wrong(name, "this must be a file, which its part says by a filename.")


def read_form(body: bytes, content_type: str) -> Form:
    """Raises BadRequest: it is no form, or over a limit."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise BadRequest("Content-Type: multipart/form-data needs a boundary.", param="Content-Type")
    form, ends = Form(), list[bool]()
    config = {"MAX_HEADER_SIZE": FORM_HEADER.most, "MAX_MEMORY_FILE_SIZE": len(body)}
    try:
        parser = FormParser(MULTIPART, form.add, form.add, lambda: ends.append(True), boundary=boundary, config=config)
        for begin in range(0, len(body), PIECE):
            parser.write(body[begin : begin + PIECE])
        parser.finalize()
    except (FormParserError, UnicodeError) as error:
        raise BadRequest(f"The body is no form that can be read: {str(error)[:200]}.") from None
    if not ends:
        raise BadRequest("The form has no end: its last boundary is missing.")
    return form
