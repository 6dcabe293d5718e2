from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from start_llm.images.pixels import ImageFile, ImageTooLarge, Unreadable
from tests.images.corpus import MOST_PIXELS, raw_png
from tests.images.pictures import encoded, noise


def opened(data: bytes) -> ImageFile:
    return ImageFile(data, MOST_PIXELS)


def test_the_same_pixels_are_the_same_image() -> None:
    picture = noise(70, 50)
    identity = opened(encoded(picture)).identity()
    assert opened(encoded(picture, "PNG", compress_level=1)).identity() == identity
    assert opened(encoded(picture, "WEBP", lossless=True)).identity() == identity
    assert opened(encoded(picture.convert("RGBA"))).identity() == identity
    turned = Image.Exif()
    turned[0x0112] = 3
    assert opened(encoded(picture.rotate(180), "PNG", exif=turned)).identity() == identity


def test_one_changed_pixel_or_another_shape_is_another_image() -> None:
    picture = noise(2000, 400)  # several bands
    identity = opened(encoded(picture)).identity()
    picture.putpixel((1999, 399), (0, 0, 1))
    assert opened(encoded(picture)).identity() != identity
    flat = Image.new("RGB", (20, 10))
    assert opened(encoded(flat)).identity() != opened(encoded(flat.resize((10, 20)))).identity()


def test_the_identity_is_of_the_pixels_that_are_shown() -> None:
    for mode in ("RGB", "RGBA", "LA", "P", "L", "1"):
        data = encoded(noise(33, 21).convert(mode))
        again = encoded(opened(data).upright())
        assert opened(again).identity() == opened(data).identity(), mode


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    data = encoded(Image.fromarray(np.full((4, 4), 40000, np.uint16)))
    assert opened(data).upright().getpixel((1, 1)) == (156, 156, 156)


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (3, 3), (0, 0, 0, 0))
    assert opened(encoded(clear)).upright().getpixel((0, 0)) == (255, 255, 255)


def test_what_a_jpeg_costs_is_bounded_by_its_scans_and_its_size() -> None:
    data = encoded(Image.new("L", (7000, 7000)), "JPEG", progressive=True)
    scans = data.count(b"\xff\xda")
    assert scans >= 6 and ImageFile(data, 50_000_000).width == 7000
    with pytest.raises(Unreadable, match="too many scans"):
        ImageFile(data + b"\xff\xda" * (23 - scans), 50_000_000)


def test_what_finding_out_has_cost_is_told_of_files_that_give_no_picture_too() -> None:
    picture = Image.new("RGB", (70, 70))
    plain, data = encoded(picture), encoded(picture, "JPEG", progressive=True)
    assert opened(data).cost == opened(plain).cost == 4900
    scans = b"\xff\xda" * (50 - data.count(b"\xff\xda"))
    assert opened(data + scans).cost == 5 * 4900
    with pytest.raises(Unreadable) as found:
        opened(plain[:-30]).identity()
    assert found.value.cost == 4900


@pytest.mark.parametrize("count", [1, 3])  # Pillow has a limit for one text, too
def test_texts_in_a_png_are_unpacked_within_a_limit(count: int) -> None:
    words = PngImagePlugin.PngInfo()
    for number in range(count):
        words.add_text(f"{number}", "a" * (3_000_000 // count), zip=True)
    with pytest.raises(Unreadable, match="a PNG whose texts are too long"):
        opened(encoded(Image.new("RGB", (1, 1)), pnginfo=words))


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageTooLarge, match="8000x8000"):
        opened(raw_png(8000, 8000, bytes(10)))
