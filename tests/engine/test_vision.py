"""Images through the whole engine, on tiny models of all families: what is reused is what a cold run computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.generate import generate_step

from start_llm.core.errors import NotSupported
from start_llm.core.prompt import FIRST_IMAGE_ID, ImageSpan, Prompt, image_ids
from start_llm.core.request import Sampling
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.engine.vision import VisionModel
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.engine.fakes import Collected, scheduler_on, steps, steps_until, submit
from tests.engine.vision_zoo import CLOSES, CONFIGS, OPENS, PAD, VOCAB, make
from tests.kinds import some

FAMILIES = list(CONFIGS)


def quick(*quick_ones: str) -> list[Any]:
    """All families; all but these are slow tests."""
    return [family if family in quick_ones else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


ANSWER = 48
NEVER = VOCAB + 5


@dataclass(frozen=True)
class Picture:
    """An image of so many patches; `seed` makes its pixels."""

    seed: int
    rows: int = 4
    columns: int = 8

    def length(self, family: str) -> int:
        return 16 if family == "gemma3" else self.rows * self.columns // 4

    def prepare(self, family: str) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        if family == "gemma3":
            return {"pixel_values": rng.normal(size=(1, 3, 112, 112)).astype(np.float32), "length": 16}
        patch = CONFIGS[family]["vision_config"]["patch_size"]
        pixels = rng.normal(size=(self.rows * self.columns, 3 * 2 * patch * patch)).astype(np.float32)
        return {"pixel_values": pixels, "image_grid_thw": np.array([[1, self.rows, self.columns]])}


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 200, length).tolist()


def prompt(family: str, parts: Sequence[list[int] | Picture]) -> Prompt:
    tokens: list[int] = []
    images: list[ImageSpan] = []
    boundaries: list[int] = []
    for part in parts:
        if isinstance(part, Picture):
            key, length = f"{family} {part}", part.length(family)
            tokens.append(OPENS)
            images.append(ImageSpan(len(tokens), length, key, partial(part.prepare, family)))
            tokens += [*image_ids(key, length), CLOSES]
        else:
            boundaries += [len(tokens)] if tokens else []
            tokens += part
    return Prompt(tuple(tokens), tuple(boundaries), generation=len(tokens) - 2, images=tuple(images))


@dataclass
class Engine:
    """A scheduler on a vision model of its own, with a real store."""

    family: str
    disk: DiskTier | None = None
    step: int = 24
    model: VisionModel = field(init=False)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.model = VisionModel(make(self.family), PAD)
        kit = LayerKit(self.model.make_cache)
        self.kv = KVStore(kit, StoreConfig(budget_bytes=1 << 28, checkpoint_grid=64), disk=self.disk)
        store = GuardedStore(self.kv, self.model.make_cache)
        runner = ModelRunner(self.model, eos=[NEVER], max_rows=4)
        self.scheduler = scheduler_on(runner, store, 4, step=self.step)

    def add(self, name: str, asked: Prompt, most: int = ANSWER) -> Collected:
        work, sink = submit(name, asked.tokens, max_tokens=most)
        self.scheduler.add(replace(work, prompt=asked, sampling=Sampling(temperature=0.0)))
        return sink

    def run(self) -> None:
        steps_until(self.scheduler, lambda: not self.scheduler.busy)

    def ask(self, parts: Sequence[list[int] | Picture], most: int = ANSWER) -> Collected:
        sink = self.add("a", prompt(self.family, parts), most)
        self.run()
        return sink


def cold(family: str, parts: Sequence[list[int] | Picture], most: int = ANSWER) -> tuple[int, ...]:
    """The greedy answer of the bare model to the whole prompt at once."""
    asked = prompt(family, parts)
    model = VisionModel(make(family), PAD)
    cache = model.make_cache()
    logits = model.see(asked.tokens, cache, asked.images)
    found: list[int] = []
    while len(found) < most:
        found.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([found[-1:]]), cache=cache)
    return tuple(found)


# --- continuing -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", quick("qwen3_vl", "gemma3"))
@pytest.mark.thorough
def test_every_continuation_equals_the_cold_run(family: str) -> None:
    """Images before, at the end of, and behind what is reused: one, two and three of them."""
    engine = Engine(family)
    one, two, three = Picture(1), Picture(2, 6, 4), Picture(3, 4, 4)
    turns: list[list[int] | Picture] = [text(1, 30), one, text(2, 40)]
    added: list[list[list[int] | Picture]] = [
        [text(3, 20)],
        [text(4, 12), two, text(5, 9)],
        [three, text(6, 15)],
        [text(7, 30)],
    ]
    reused = []
    for index, more in enumerate([[], *added]):
        turns = [*turns, *more]
        sink = engine.ask(turns)
        assert sink.done.tokens == cold(family, turns), f"turn {index}"
        reused.append(sink.done.report.reused)
        turns = [*turns, list(sink.done.tokens)]
    lengths = [len(prompt(family, turns[: turns.index(more[0])]).tokens) for more in added]
    assert all(known >= length - 1 for known, length in zip(reused[1:], lengths, strict=True)), (reused, lengths)
    assert engine.model.encoded == 3
    assert engine.scheduler.figures()["vlm_retreat"] == 0


@pytest.mark.parametrize("family", quick("qwen3_5"))
def test_rows_beside_each_other_do_not_disturb_each_other(family: str) -> None:
    engine = Engine(family)
    asked: list[list[list[int] | Picture]] = [
        [text(1, 50)],
        [text(2, 20), Picture(1), text(3, 30)],
        [Picture(2, 6, 4), text(4, 11), Picture(1), text(5, 6)],
        [text(6, 33)],
    ]
    sinks = [engine.add(str(number), prompt(family, parts)) for number, parts in enumerate(asked)]
    engine.run()
    for parts, sink in zip(asked, sinks, strict=True):
        assert sink.done.tokens == cold(family, parts)


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_after_a_restart_images_are_not_encoded_again(family: str, tmp_path: Path) -> None:
    parts: list[list[int] | Picture] = [text(1, 40), Picture(1), text(2, 30)]
    first = Engine(family, DiskTier(tmp_path, "model", 1 << 28))
    said = first.ask(parts).done.tokens
    assert first.kv.disk.flush()
    first.kv.close()
    parts = [*parts, list(said), text(3, 10)]
    second = Engine(family, DiskTier(tmp_path, "model", 1 << 28))
    sink = second.ask(parts)
    assert sink.done.tokens == cold(family, parts)
    assert second.model.encoded == 0 and sink.done.report.reused > 70
    second.kv.close()


@pytest.mark.parametrize("family", some(["gemma3", "qwen3_vl"]))
def test_a_chunk_never_ends_inside_an_image(family: str) -> None:
    engine = Engine(family, step=5)
    parts: list[list[int] | Picture] = [text(1, 13), Picture(1), Picture(2), text(2, 17)]
    assert engine.ask(parts).done.tokens == cold(family, parts)
    assert engine.model.encoded == 2


def test_a_cancelled_prefill_keeps_whole_images() -> None:
    engine = Engine("qwen3_vl", step=8)
    parts: list[list[int] | Picture] = [text(1, 13), Picture(1), text(2, 60)]
    engine.add("a", prompt("qwen3_vl", parts))
    steps(engine.scheduler, 4)
    engine.scheduler.requests.cancel("a")
    engine.run()
    sink = engine.ask(parts)
    assert sink.done.report.reused >= 14 + Picture(1).length("qwen3_vl")
    assert sink.done.tokens == cold("qwen3_vl", parts) and engine.model.encoded == 1
    assert engine.scheduler.figures()["vlm_retreat"] == 0


def test_an_image_is_encoded_once_while_there_is_room_for_what_was_made_of_it() -> None:
    asked = prompt("qwen3_vl", [text(1, 10), Picture(1), text(2, 10), Picture(2)])
    roomy, narrow = VisionModel(make("qwen3_vl"), PAD), VisionModel(make("qwen3_vl"), PAD, features_bytes=1)
    found = []
    for encoded in ((2, 2), (2, 4)):
        for model in (roomy, narrow):
            found.append(model.see(asked.tokens, model.make_cache(), asked.images))
        assert (roomy.encoded, narrow.encoded) == encoded
    assert all(mx.array_equal(found[0], each).item() for each in found)


def test_kv_that_ends_inside_an_image_is_given_up(tmp_path: Path) -> None:
    """It cannot come to be; if it is there all the same, nothing of it is used, now or by the next request."""
    engine = Engine("qwen3_vl", DiskTier(tmp_path, "model", 1 << 28))
    parts: list[list[int] | Picture] = [text(1, 40), Picture(1), text(2, 30)]
    tokens = prompt("qwen3_vl", parts).tokens[: 41 + 3]
    wrong = engine.model.make_cache()
    mx.eval(engine.model(mx.array([tokens]), cache=wrong), [layer.state for layer in wrong])
    engine.kv.put(tokens, wrong)
    assert engine.kv.disk.flush()
    for more in ([], [text(3, 12)]):
        sink = engine.ask([*parts, *more])
        assert sink.done.tokens == cold("qwen3_vl", [*parts, *more])
    assert sink.done.report.reused > 60
    assert engine.scheduler.figures()["vlm_retreat"] == 1
    assert engine.kv.disk.flush()
    engine.kv.close()
    again = Engine("qwen3_vl", DiskTier(tmp_path, "model", 1 << 28))
    assert again.ask([*parts, text(4, 9)]).done.tokens == cold("qwen3_vl", [*parts, text(4, 9)])
    assert again.scheduler.figures()["vlm_retreat"] == 0
    again.kv.close()


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_answers_are_those_of_mlx_vlm(family: str) -> None:
    """Its own loop, on the whole prompt at once; gemma3's images, too, are seen as it shows them."""
    parts: list[list[int] | Picture] = [text(1, 30), Picture(1), text(2, 20)]
    asked = prompt(family, parts)
    (image,) = asked.images
    prepared = image.prepare()
    more = {name: mx.array(value) for name, value in prepared.items() if name == "image_grid_thw"}
    ids = mx.array([[PAD if token >= FIRST_IMAGE_ID else token for token in asked.tokens]])
    pixels = mx.array(prepared["pixel_values"])
    steps = generate_step(
        ids, make(family), pixels, mx.ones(ids.shape, mx.int32), max_tokens=24, temperature=0.0, **more
    )
    theirs = tuple(int(step[0]) for step in steps)
    assert Engine(family, step=16).ask(parts, 24).done.tokens == theirs


# --- parts ------------------------------------------------------------------------------------


def test_ids_of_places_are_beyond_every_vocabulary_and_differ() -> None:
    one, two = image_ids("one", 500), image_ids("two", 500)
    assert all(FIRST_IMAGE_ID <= token < 2**31 for token in one + two)
    assert one[:300] == image_ids("one", 300) and not set(one) & set(two)


def test_ids_of_places_never_reach_the_embedding() -> None:
    model = VisionModel(make("qwen3_vl"), PAD)
    strange, plain = mx.array([[5, FIRST_IMAGE_ID + 7, 6]]), mx.array([[5, PAD, 6]])
    assert mx.array_equal(model(strange, cache=model.make_cache()), model(plain, cache=model.make_cache())).item()


def test_a_model_that_places_images_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = make("qwen3_vl")
    kind = type(vlm.language_model)
    monkeypatch.setattr(kind, "get_rope_index", lambda self, ids, *more: (mx.zeros((3, *ids.shape)), None))
    with pytest.raises(NotSupported, match="places its images in another way"):
        VisionModel(vlm, PAD)
