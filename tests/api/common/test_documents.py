"""PDF files in messages: their text reaches the model; a hostile one ends with a sentence, and no other request."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from start_llm.api.anthropic.messages import _block_content
from start_llm.api.common import documents
from start_llm.api.common.documents import MOST_BYTES, pdf_text
from start_llm.api.common.fields import BodyModel, parse_body
from start_llm.api.common.parts import content_of
from start_llm.audio import decoder_child
from start_llm.audio.decoder import NotDecoded
from start_llm.core.errors import BadRequest, NotSupported

pypdf = pytest.importorskip("pypdf")
pytestmark = pytest.mark.live


def pdf(*streams: bytes, packed: bool = False) -> bytes:
    """A file with a page for each stream of drawing orders."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * at) for at in range(len(streams)))
    objects += [b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(streams))]
    objects += [b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for at, stream in enumerate(streams):
        fonts = b"<< /Font << /F 3 0 R >> >>"
        objects.append(b"<< /Type /Page /Parent 2 0 R /Resources %s /Contents %d 0 R >>" % (fonts, 5 + 2 * at))
        data, how = (zlib.compress(stream, 9), b"/Filter /FlateDecode ") if packed else (stream, b"")
        objects.append(b"<< %s/Length %d >> stream\n%s\nendstream" % (how, len(data), data))
    body = b"".join(b"%d 0 obj %s endobj\n" % (number, text) for number, text in enumerate(objects, 1))
    return b"%%PDF-1.4\n%btrailer << /Root 1 0 R /Size %d >>\nstartxref\n0\n%%%%EOF\n" % (body, len(objects) + 1)


def words(text: str) -> bytes:
    return b"BT /F 12 Tf 10 10 Td (%s) Tj ET" % text.encode()


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    documents._reader.cache_clear()
    yield
    documents._reader()[0].close_child()
    documents._reader.cache_clear()


SHOWN = "[File a report.pdf]\nPage 1 of 2:\nThe zebra\n\nPage 2 of 2:\nhas stripes\n[End of a report.pdf]"
URL = f"data:application/pdf;base64,{sent(pdf(words('The zebra'), words('has stripes')))}"


def test_the_text_of_each_page_stands_where_the_file_was_sent() -> None:
    before, after = {"type": "text", "text": "before "}, {"type": "text", "text": " after"}
    chat = {"type": "file", "file": {"file_data": URL, "filename": "a\nreport.pdf"}}
    for part in (chat, {"type": "input_file", "file_data": URL, "filename": "a report.pdf"}):
        assert content_of([before, part, after], "content").text == f"before {SHOWN} after"


def test_a_document_of_the_messages_api_is_read_too() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": URL.partition(",")[2]}
    block = {"type": "document", "source": source, "context": "Read it."}
    assert "Read it." in (text := _block_content("document", block, "content[0]").text)
    assert "Page 2 of 2:\nhas stripes\n[End of document.pdf]" in text


def test_a_file_is_read_once_and_the_child_serves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sent(pdf(words("once")))
    first = pdf_text(data, None, "p")
    decoder = documents._reader()[0]
    child = decoder._child
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "text", None)
        assert pdf_text(data, None, "p") == first
    assert "other" in pdf_text(sent(pdf(words("other"))), None, "p") and decoder._child is child


LOOP = b"%PDF-1.4\n1 0 obj << /Type /Catalog /Pages 2 0 R >> endobj\n"
LOOP += b"2 0 obj << /Type /Pages /Kids [2 0 R] /Count 1 >> endobj\n"
LOOP += b"trailer << /Root 1 0 R /Size 3 >>\nstartxref\n0\n%%EOF\n"


def bomb() -> bytes:
    """Made in its test: it takes seconds, and each worker collects this file."""
    return pdf(b"BT /F 12 Tf " + b"(xxxxxxxx) Tj " * 20_000_000 + b"ET", packed=True)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: b"not a PDF at all", "does not begin as one"),
        (lambda: b"%PDF-1.4", "damaged"),
        (lambda: pdf(b""), "no text in it"),
        (lambda: pdf(*[b""] * 501), "501 pages"),
        (lambda: pdf(words("x"))[:200], "."),
        (lambda: LOOP, "."),
        (bomb, "."),
        (lambda: b"%PDF-" + bytes(MOST_BYTES), "are read at most"),
    ],
    ids=["no PDF", "nothing", "no text", "pages", "cut", "loop", "bomb", "bytes"],
)
def test_a_hostile_file_ends_with_a_sentence_and_the_next_one_is_read(made: Callable[[], bytes], why: str) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        pdf_text(sent(made()), "x.pdf", "messages[0].content[1]")
    assert caught.value.message.startswith("messages[0].content[1]: this PDF cannot be shown: ")
    assert "pages as images" in caught.value.message and caught.value.param == "messages[0].content[1]"
    assert "fine" in pdf_text(sent(pdf(words("fine"))), "x.pdf", "p")


class Slow:
    """Takes what it is said to take, and no time."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.allowed = [*seconds], list[float]()

    def text(self, data: bytes, seconds: float) -> tuple[str, float]:
        self.allowed.append(seconds)
        return "x", self.seconds.pop(0)


def test_the_files_of_one_request_have_one_bound_and_the_next_request_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, kept = Slow(50.0, 11.0, 1.0), documents._reader()[1]
    monkeypatch.setattr(documents, "_reader", lambda: (slow, kept))
    documents.begin_request()
    files = [sent(pdf(words(str(number)))) for number in range(4)]
    for number in range(2):
        pdf_text(files[number], None, f"content[{number}]")
    with pytest.raises(BadRequest, match=r"content\[2\]: .* the files before it took over 60 seconds"):
        pdf_text(files[2], None, "content[2]")
    assert pdf_text(files[0], None, "content[2]"), "one that is known takes nothing"
    parse_body(BodyModel, b"{}")
    assert pdf_text(files[3], None, "content[0]") and slow.allowed == [60.0, 10.0, 60.0]


def test_a_file_that_takes_longer_than_is_left_is_ended() -> None:
    decoder = documents._reader()[0]
    with pytest.raises(NotDecoded, match="too long"):
        decoder.text(bomb(), 0.0)


def test_halves_of_a_sign_are_joined_and_what_needs_another_library_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = Mock(side_effect=pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm"))
    page = SimpleNamespace(extract_text=lambda: "a \ud83d\ude00 \ud800 b")
    monkeypatch.setattr(pypdf, "PdfReader", lambda _: SimpleNamespace(is_encrypted=False, pages=[page]))
    assert decoder_child._pdf_text(b"").encode().decode() == "Page 1 of 1:\na \U0001f600 \ufffd b"
    monkeypatch.setattr(pypdf, "PdfReader", locked)
    with pytest.raises(ValueError, match="cryptography>=3"):
        decoder_child._pdf_text(b"")


def test_what_is_no_base64_or_no_pdf_is_refused() -> None:
    with pytest.raises(BadRequest, match="no base64"):
        pdf_text("###", "x", "p")
    for file in ({"file_id": "f"}, {"file_data": "data:text/plain;base64,eA=="}, {"file_data": "eA=="}):
        with pytest.raises(NotSupported, match="data URL"):
            content_of([{"type": "file", "file": file}], "content")
