"""Marks of images to tokens, and where the images stand in a prompt. For models with eyes; others see no marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from start_llm.core.images import MARK, Picture
from start_llm.core.prompt import FIRST_IMAGE_ID, ImageSpan, image_ids
from start_llm.prompt.ports import Eyes


class ImageMarks:
    """Thread-safe."""

    def __init__(self, eyes: Eyes) -> None:
        self._eyes = eyes

    def around(self, mark: re.Match[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the processor writes before and behind an image."""
        before, _, behind = self._eyes.places(int(mark[2]), int(mark[3]))
        return before, behind

    def places(self, mark: re.Match[str]) -> tuple[int, ...]:
        """Ids of the image's places."""
        _, length, _ = self._eyes.places(int(mark[2]), int(mark[3]))
        return image_ids(self._eyes.key(mark[1]), length)

    def unknown(self, text: str, pictures: Mapping[str, Picture]) -> bool:
        """Whether `text` shows an image that is not at hand (its client has cleared the message that held it)."""
        return any(match[1] not in pictures for match in MARK.finditer(text))

    def spans(self, text: str, tokens: Sequence[int], pictures: Mapping[str, Picture]) -> tuple[ImageSpan, ...] | None:
        """The images of a prompt; None if its tokens are not those of its text (another processor made them).

        Images that `tokens` end before are left out.
        """
        spans: list[ImageSpan] = []
        at = 0
        for match in MARK.finditer(text):
            while at < len(tokens) and tokens[at] < FIRST_IMAGE_ID:
                at += 1
            if at == len(tokens):
                return tuple(spans)
            picture = pictures[match[1]]
            _, length, _ = self._eyes.places(picture.width, picture.height)
            key = self._eyes.key(picture.identity)
            if tuple(tokens[at : at + length]) != image_ids(key, length):
                return None
            spans.append(ImageSpan(at, length, key, partial(_prepare, self._eyes, picture)))
            at += length
        return tuple(spans) if all(token < FIRST_IMAGE_ID for token in tokens[at:]) else None


def _prepare(eyes: Eyes, picture: Picture) -> dict[str, object]:
    return eyes.prepare(picture.load())
