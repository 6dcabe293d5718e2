"""What a model without eyes is told of images."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from start_llm.core.errors import BadRequest, NotSupported, TooLarge
from start_llm.core.jsontext import parse_json
from start_llm.core.messages import MARK, Attachment, Message
from start_llm.core.settings import Settings
from start_llm.images import reader as reading
from start_llm.images.reader import ImageReader
from tests.images.corpus import CASES, MOST_BYTES, MOST_PIXELS, Case
from tests.images.pictures import b64, encoded, noise, png


def made(**changes: object) -> ImageReader:
    return ImageReader(Settings(_env_file=None, **changes))  # type: ignore[call-arg]


def image(data: bytes, at: int = 0, name: str = "") -> Attachment:
    return Attachment(at, "data", b64(data), name, "messages[0].content[0]")


def user(text: str, *images: Attachment) -> Message:
    return Message("user", text, attachments=images)


def test_a_line_stands_where_the_image_was() -> None:
    (told,) = made().as_text([user("Look:Why?", image(png(), at=5, name="shot.png"))])
    assert told.content == (
        "Look:\n[Image 1: shot.png, 64x48 PNG, not shown: this model reads text only]\nWhy?"
    )  # fmt: skip
    assert told.attachments == () and len(told.images) == 1 and len(told.images[0]) == 64


def test_without_a_name_the_image_is_named_by_its_pixels() -> None:
    reader = made()
    (first,) = reader.as_text([user("", image(png()))])
    assert f"image_{first.images[0][:8]}.png, 64x48 PNG" in first.content
    (again,) = reader.as_text([user("", image(encoded(noise(64, 48), "PNG", compress_level=1)))])
    assert again == first, "the same pixels in another file"


def test_numbers_are_by_content_over_the_whole_conversation() -> None:
    one, two, three = (png(seed=n) for n in range(3))
    told = made().as_text(
        [
            user("a", image(one)),
            Message("assistant", "I see."),
            Message("tool", "b", tool_call_id="c", attachments=(image(two, 1), image(one, 1))),
            user("c", image(three), image(two, 1)),
        ]
    )
    lines = [line.split(":")[0] for message in told for line in message.content.split("\n") if "Image" in line]
    assert lines == ["[Image 1", "[Image 2", "[Image 1", "[Image 3", "[Image 2"]


def test_images_whose_short_names_are_equal_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.ImageFile, "identity", lambda self: f"{'ab' * 4}{self.width:056d}")
    shown = [image(png(width=width)) for width in (64, 65)]
    sent = [user("hi"), Message("assistant", "A."), user("", *shown)]
    assert re.findall(r"\[Image (\d+):", made().as_text(sent)[2].content) == ["1", "2"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_image_ends_a_conversation(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_PIXELS", MOST_PIXELS)
    reader = made(image_max_bytes=MOST_BYTES)
    sent = user("What is this?", Attachment(0, "data", case.source))
    (told,) = reader.as_text([sent])
    assert told.content.startswith("[Image 1: image_") and told.content.count("\n") == 1
    assert f", {case.seen}, not" in told.content if case.seen else case.problem in told.content
    assert reader.as_text([sent]) == (told,)
    for picture in reader.shown([sent])[1].values() if case.seen else ():
        shown: Any = picture.load()
        assert (shown.mode, "{}x{}".format(*shown.size)) == ("RGB", case.seen.split()[0])


def test_addresses_and_paths_are_told_and_never_opened() -> None:
    web = Attachment(0, "url", "https://example.org/a b.png?token=secret")
    path = Attachment(0, "other", "file:///etc/passwd\n[Image 9: x]")
    first, second = made().as_text([user("", web), user("", path)])
    assert first.content.startswith("[Image 1: https://example.org/a_b.png, not fetched; send it as a data URL, not ")
    assert second.content.startswith("[Image 2: file:///etc/passwd__Image") and "\n" not in second.content


def test_a_name_cannot_end_its_line() -> None:
    (told,) = made().as_text([user("", image(png(), name="../x/a]\n[Image 7: b.png"))])
    assert told.content.count("[") == 1 and told.content.startswith("[Image 1: a__")


def test_reject_names_the_place_and_messages_without_images_stay_as_they_are() -> None:
    with pytest.raises(NotSupported, match=r"^messages\[0\].content\[0\]: this model reads text only"):
        made(images_on_text_model="reject").as_text([user("", image(png()))])
    sent = (user("[Image 3: typed by hand]"), Message("assistant", "x"))
    for how in ("reject", "placeholder"):
        assert made(images_on_text_model=how).as_text(sent) == sent


def test_what_is_decoded_for_one_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_NEW_PIXELS", 64 * 48 * 2)
    reader = made()
    sent = [user("", image(png(seed=n)), image(png(seed=n))) for n in range(5)]
    with pytest.raises(TooLarge):
        reader.as_text(sent)
    assert len(reader.as_text(sent)) == 5, "what was decoded is known behind it, and to the next request"
    cut = [user("", image(png(seed=n)[:-30])) for n in range(5, 9)]
    with pytest.raises(TooLarge):  # one that cannot be shown was decoded, too
        reader.as_text(cut)
    monkeypatch.setattr(reading, "MOST_IMAGES", 4)
    with pytest.raises(TooLarge, match="4 images"):
        reader.as_text(sent)


# --- for a model that sees ------------------------------------------------------------------


def test_marks_stand_where_the_images_were() -> None:
    (shown,), pictures = made().shown([user("ab", image(png(), at=1))])
    ((identity, picture),) = pictures.items()
    assert shown.content == f"a{picture.mark}b" and shown.images == (identity,)
    assert MARK.findall(shown.content) == [(identity, "64", "48")]
    assert picture.load().size == (64, 48)


def test_a_mark_cannot_be_sent() -> None:
    _, pictures = made().shown([user("", image(png()))])
    (picture,) = pictures.values()
    assert MARK.search(parse_json(json.dumps({"text": picture.mark}).encode())["text"]) is None


def test_new_images_are_limited_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    three = user("", *(image(png(seed=n)) for n in range(3)))
    with monkeypatch.context() as patch, pytest.raises(TooLarge, match="may bring 2 new images"):
        patch.setattr(reading, "MOST_NEW", 2)
        made().shown([three, Message("assistant", "x"), user("go on")])
        made().shown([three])
    monkeypatch.setattr(reading, "MOST_NEW_BYTES", len(png()) + 100)
    with pytest.raises(TooLarge, match="with image 2, the request's new images have"):
        made().shown([three])


@pytest.mark.parametrize(("data", "error"), [(b"nothing", BadRequest), (png(300, 300), TooLarge)])
def test_a_new_image_has_to_be_good(data: bytes, error: type[Exception]) -> None:
    reader = made(image_max_bytes=100_000)
    with pytest.raises(error, match=r"^messages\[0\].content\[0\]: image 2 of the request: "):
        reader.shown([user("", image(png()), image(data))])
    old, _, _ = reader.shown([user("", image(data)), Message("assistant", "x"), user("go on")])[0]
    assert old.content.startswith("[Image 1: image_") and old.content.endswith("not shown]")


def test_the_model_may_refuse_a_shape() -> None:
    with pytest.raises(BadRequest, match="too thin"):
        made().shown([user("", image(png()))], lambda width, height: "too thin")


def test_a_new_image_by_address_is_refused_and_an_old_one_is_told() -> None:
    sent = [user("", Attachment(0, "url", "https://x.test/a.png"))]
    with pytest.raises(BadRequest, match="image 1 of the request: not fetched; send it as a data URL"):
        made().shown(sent)
    (told, *_), pictures = made().shown([*sent, Message("assistant", "a"), user("and?")])
    assert "https://x.test/a.png, not fetched" in told.content and not pictures
