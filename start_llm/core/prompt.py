"""A prompt ready for the model: what `prompt` makes, `engine` runs and `kvcache` stores."""

from __future__ import annotations

from dataclasses import dataclass

from start_llm.core.vision import ImageSpan


@dataclass(frozen=True, slots=True)
class Prompt:
    """Model tokens with the places where the store may want a restore point.

    Attributes:
        tokens: model tokens, the generation prompt included.
        boundaries: ascending token offsets at which a message begins (0 excluded).
        head: end of the tools+system block, a token offset, 0 if there is none.
        transient: offset at which a trailing transient message begins, or ``None``.
        generation: offset at which the generation prompt begins (``len(tokens)`` if there is none).
        images: the images in it, ascending; `tokens` hold ids of their own in their places.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    head: int = 0
    transient: int | None = None
    generation: int = 0
    images: tuple[ImageSpan, ...] = ()

    def image_at(self, offset: int) -> ImageSpan | None:
        """The image that `offset` would cut in two."""
        return next((image for image in self.images if image.start < offset < image.end), None)
