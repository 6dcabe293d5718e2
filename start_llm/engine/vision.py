"""A model of mlx-vlm in the shape of a text model of mlx-lm, with its vision part or without. Model thread only.

Loops, batches, drafts and the store work on ``model(tokens, cache=...)`` and mlx-lm's cache layers, and need not know
of images (docs/images.md). An image's places have ids of their own (`core.prompt`); `see` puts its features there.
mlx-vlm keeps positions (`rope_deltas`) on the model object; here they are a cache layer more, a `KVCache` of one number
a token: the position that follows it. mlx-vlm's copies of mlx-lm's cache classes are replaced by mlx-lm's own.

Uses of mlx-vlm's internals: `get_input_embeddings`, `language_model(..., inputs_embeds, position_ids, visual_pos_masks,
deepstack_visual_embeds)`, `language_model.model.embed_tokens`; of mlx-lm's: `BatchKVCache._idx`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from start_llm.core.errors import NotSupported
from start_llm.core.prompt import FIRST_IMAGE_ID, ImageSpan
from start_llm.files.lru import Lru

FEATURES_BYTES = 256 << 20
"""What the vision tower made of images is kept in so much memory, those that were used last."""


class StateLayer(ArraysCache):  # type: ignore[misc]
    """mlx-lm's `ArraysCache` with the two writes that mlx-vlm's models use."""

    metadata_revision = 0
    is_speculating = False
    history_capacity = 0

    def update_recurrent(self, index: int, length: int, update: Callable[[Any, int | None], Any]) -> Any:
        output, state = update(self.cache[index], None)[:2]
        self.cache[index] = state
        return output, state

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None) -> mx.array:
        """Keeps the last `width` of `source` [rows, tokens, ...]; with `lengths`, those before each row's padding."""
        length = source.shape[1] - width
        if lengths is None:
            state = mx.contiguous(source[:, length:])
        else:
            places = mx.clip(lengths, 0, length)[:, None] + mx.arange(width)
            state = mx.take_along_axis(source, places.reshape(*places.shape, *([1] * (source.ndim - 2))), axis=1)
        self.cache[index] = state
        return state

    def extract(self, idx: int) -> StateLayer:
        row = StateLayer(len(self.cache))
        row.cache = [None if array is None else array[idx : idx + 1] for array in self.cache]
        return row


class LanguageAlone:
    """A language model of mlx-vlm with the call interface of a model of mlx-lm: ``model(tokens, cache=...)`` gives
    logits."""

    def __init__(self, language: Any) -> None:
        self._language = language
        self._takes_positions = hasattr(language, "get_rope_index")  # positions are given to it, and have a cache layer
        self._axes = (
            3 if not self._takes_positions else language.get_rope_index(mx.array([[0]]), None, None, None)[0].ndim
        )
        self._compute: Callable[..., mx.array] = lambda ids, **more: cast(mx.array, language(ids, **more).logits)

    def computed_by(self, compute: Callable[..., mx.array]) -> Self:
        """This model, whose logits `compute` makes of what the module inside of the language model takes."""
        other = copy(self)
        other._compute = compute
        return other

    @property
    def language_model(self) -> Any:
        return self._language

    def make_cache(self) -> list[Any]:
        """Empty caches: the language model's, and the positions behind them."""
        layers = make_prompt_cache(self._language)
        if all(type(layer).__name__ in _OF_MLX_LM for layer in layers):
            layers = [_OF_MLX_LM[type(layer).__name__](layer) for layer in layers]
        return [*layers, KVCache()] if self._takes_positions else layers

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits [rows, tokens, vocabulary] of text."""
        cache = self.make_cache() if cache is None else cache
        if not self._takes_positions:
            return self._compute(inputs, cache=cache)
        rows, length = inputs.shape
        positions = _next_position(cache[-1], rows)[:, None] + mx.arange(length)
        shown = mx.broadcast_to(positions, (3, rows, length)) if self._axes == 3 else positions
        return self._run(inputs, cache, shown, positions + 1)

    def _run(self, ids: mx.array, cache: list[Any], positions: mx.array, following: mx.array, **more: Any) -> mx.array:
        """`positions`: [rows, tokens] or [3, rows, tokens]. `following` [rows, tokens]: the position behind each."""
        inner = cache[:-1]
        logits = self._compute(ids, cache=inner, position_ids=positions, **more)
        cache[:-1] = inner  # some models put new layers into the list
        rows = following.astype(mx.float32)[:, None, :, None]
        cache[-1].update_and_fetch(rows, rows)
        return logits


@dataclass(frozen=True, slots=True)
class Features:
    """What the vision tower made of an image."""

    rows: mx.array  # [tokens, width], as the language model takes them
    deep: tuple[mx.array, ...]  # per early layer [tokens, width], added there (deepstack); empty for most models
    grid: tuple[int, int] | None  # rows and columns of its tokens, ``None`` where positions just go on

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + sum(layer.nbytes for layer in self.deep))


class VisionModel(LanguageAlone):
    """A model of mlx-vlm that sees. `encoded`: images that went through the vision tower."""

    def __init__(self, vlm: Any, pad: int, features_bytes: int = FEATURES_BYTES) -> None:
        """`pad`: the token that stands for a place of an image. Raises NotSupported for a family whose positions are of
        a kind unknown here."""
        super().__init__(vlm.language_model)
        self._vlm, self._pad, config = vlm, pad, vlm.config
        self._opens = getattr(config, "vision_start_token_id", None)  # the token before an image; None: there is none
        self._merge = int(getattr(config.vision_config, "spatial_merge_size", 1) or 1)  # patches to a token, each way
        self._features = Lru[str, Features](features_bytes, lambda _, features: features.nbytes)  # by image
        self.encoded = 0
        if self._takes_positions:
            self._check_positions()

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Ids of images' places count as pad tokens."""
        return super().__call__(mx.where(inputs >= FIRST_IMAGE_ID, self._pad, inputs), cache)

    def see(self, tokens: Sequence[int], cache: list[Any], images: Sequence[ImageSpan]) -> mx.array:
        """Logits of one row that holds whole images; their starts count from the first of `tokens`."""
        ids = mx.array([self._pad if token >= FIRST_IMAGE_ID else token for token in tokens])[None]
        features = [self._features_of(image) for image in images]
        embedded = self._language.model.embed_tokens(ids)
        parts, at = [], 0
        for image, seen in zip(images, features, strict=True):
            parts += [embedded[:, at : image.start], seen.rows[None].astype(embedded.dtype)]
            at = image.end
        parts.append(embedded[:, at:])
        more: dict[str, Any] = {"inputs_embeds": mx.concatenate(parts, axis=1)}
        if any(seen.deep for seen in features):
            shown = np.zeros((1, len(tokens)), dtype=bool)
            for image in images:
                shown[:, image.start : image.end] = True
            more["visual_pos_masks"] = mx.array(shown)
            layers = zip(*(seen.deep for seen in features), strict=True)
            more["deepstack_visual_embeds"] = [mx.concatenate(list(layer), axis=0) for layer in layers]
        if not self._takes_positions:
            return self._compute(ids, cache=cache, **more)
        begins = int(cast(int, _next_position(cache[-1], 1).item()))
        grids = [(image.start, seen.grid) for image, seen in zip(images, features, strict=True)]
        positions, following = positions_of(begins, len(tokens), grids)
        return self._run(ids, cache, mx.array(positions)[:, None], mx.array(following)[None], **more)

    def _features_of(self, image: ImageSpan) -> Features:
        """Kept, or made now by the vision tower. Raises ValueError: an image has not as many places as was planned."""
        if (found := self._features.get(image.key)) is not None:
            return found
        made = self.encode(image.prepare())
        if made.rows.shape[0] != image.length:
            raise ValueError(f"an image has {made.rows.shape[0]} places, not {image.length} as was planned")
        self.encoded += 1
        self._features.put(image.key, made)
        return made

    def encode(self, prepared: Mapping[str, Any]) -> Features:
        """What a processor made of one image, through the vision tower."""
        arrays = {name: mx.array(value) for name, value in prepared.items()}
        grid = _grid(arrays.get("image_grid_thw"), self._merge)
        length = grid[0] * grid[1] if grid is not None else int(prepared["length"])
        arrays.pop("length", None)
        before = [] if self._opens is None else [int(self._opens)]
        ids = mx.array([[*before, *([self._pad] * length)]])
        pixels = arrays.pop("pixel_values")
        made = self._vlm.get_input_embeddings(ids, pixels, mask=mx.ones(ids.shape, dtype=mx.int32), **arrays)
        deep = made.deepstack_visual_embeds
        layers = () if deep is None else tuple(deep[i] for i in range(len(deep)))
        rows = made.inputs_embeds[0, len(before) :]
        mx.eval(rows, *layers)
        return Features(rows, layers, grid if self._takes_positions else None)

    def _check_positions(self) -> None:
        """The positions computed here are those of the model's own code, or the model is refused."""
        height, width = 3, 5
        ids = [7, 7, *([] if self._opens is None else [int(self._opens)]), *([self._pad] * (height * width)), 7, 7]
        start = ids.index(self._pad)
        grid = mx.array([[1, height * self._merge, width * self._merge]])
        try:
            theirs, _ = self._language.get_rope_index(mx.array([ids]), grid, None, None)
        except (TypeError, ValueError, AttributeError) as error:
            raise NotSupported(f"The positions of this vision model's images are not understood: {error}") from error
        ours, _ = positions_of(0, len(ids), [(start, (height, width))])
        theirs = np.array(theirs)
        if theirs.shape != (3, 1, len(ids)) or not np.array_equal(theirs[:, 0], ours):
            raise NotSupported("This vision model places its images in another way than the families served here.")


def positions_of(
    begins: int, length: int, images: Sequence[tuple[int, tuple[int, int] | None]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions (time, row, column) of tokens, int32 [3, length], and the position that follows each of them, [length].

    `begins`: position of the first one. `images`: (start, (rows, columns)) of those among them. An image counts as far
    as its longer side.
    """
    positions = np.zeros((3, length), dtype=np.int32)
    following = np.zeros(length, dtype=np.int32)
    at, position = 0, begins
    for start, grid in [*images, (length, None)]:
        text = np.arange(start - at, dtype=np.int32) + position
        positions[:, at:start], following[at:start] = text, text + 1
        position += start - at
        if grid is None:
            break
        rows, columns = grid
        at = start + rows * columns
        positions[0, start:at] = position
        positions[1, start:at] = position + np.repeat(np.arange(rows), columns)
        positions[2, start:at] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        following[start:at] = position
    return positions, following


def _next_position(places: Any, rows: int) -> mx.array:
    """The position behind the last token of every row, int32 [rows]."""
    last = places.offset if isinstance(places, KVCache) else places._idx
    if places.keys is None or not last:
        return mx.zeros((rows,), dtype=mx.int32)
    return cast(mx.array, places.keys[:, 0, last - 1, 0].astype(mx.int32))


def _grid(grid: mx.array | None, merge: int) -> tuple[int, int] | None:
    """Rows and columns of an image's tokens, of its patches; ``None``: it has none. Raises ValueError: a video."""
    if grid is None:
        return None
    frames, height, width = np.array(grid).reshape(3)
    if frames != 1:
        raise ValueError(f"an image of {frames} frames")
    return int(height) // merge, int(width) // merge


_OF_MLX_LM: dict[str, Callable[[Any], Any]] = {
    "KVCache": lambda layer: KVCache(),
    "RotatingKVCache": lambda layer: RotatingKVCache(max_size=layer.max_size, keep=layer.keep),
    "ArraysCache": lambda layer: StateLayer(len(layer.cache)),
}
"""An empty layer of mlx-lm for one of mlx-vlm, by the name of its class."""
