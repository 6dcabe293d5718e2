"""Prompts with images are mlx-vlm's own, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.utils import load_processor, prepare_inputs
from PIL import Image
from transformers import AutoTokenizer

from start_llm.core.messages import Message, Picture
from start_llm.core.prompt import FIRST_IMAGE_ID
from start_llm.models.vision import VisionProcessor, image_text
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.pipeline import Pipeline
from tests.engine.vision_zoo import CONFIGS
from tests.kinds import some
from tests.prompt.client import request, settings

SIZES = ((64, 64), (96, 64), (64, 128))
TEXTS = ("Look at this:", "\n\nWhat is it?", " ends in a break\n", "x")
TRIM = ("part.text if", "part.text | trim if")


def orders() -> list[tuple[str, ...]]:
    """One to three images (``i``) and texts (``t``) in every order, no two texts beside each other."""
    drawn = {order for n in (1, 2, 3) for m in range(4) for order in permutations("i" * n + "t" * m)}
    return sorted(order for order in drawn if "tt" not in "".join(order))


def parts_of(order: tuple[str, ...]) -> list[dict[str, Any]]:
    texts, images = iter(TEXTS), iter(SIZES)
    return [
        {"type": "text", "text": next(texts)}
        if kind == "t"
        else {"type": "image", "image": Image.new("RGB", next(images), "red")}
        for kind in order
    ]


def as_message(parts: list[dict[str, Any]]) -> tuple[Message, dict[str, Picture]]:
    """What `images` makes of them."""
    content, pictures = "", {}
    for part in parts:
        if part["type"] == "text":
            content += part["text"]
            continue
        image = part["image"]
        identity = f"{image.width:032x}{image.height:032x}"
        pictures[identity] = Picture(identity, image.width, image.height, lambda image=image: image)  # type: ignore[misc]
        content += pictures[identity].mark
    return Message("user", content, images=tuple(pictures)), pictures


@pytest.mark.parametrize("trims", some([True, False]))
@pytest.mark.parametrize("family", some(CONFIGS, 2))
def test_a_prompt_is_that_of_mlx_vlm(family: str, trims: bool, vision_path: Callable[[str], Path]) -> None:
    folder = vision_path(family)
    config = json.loads((folder / "config.json").read_text())
    pad = next(config[name] for name in ("image_token_id", "image_token_index") if name in config)
    processor = load_processor(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    template = template.replace(*TRIM) if trims else template

    def render(messages: list[dict[str, Any]], more: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=more, chat_template=template)
        )

    eyes = VisionProcessor(processor, text=image_text(render), pad=pad, name="test")
    pipe = Pipeline(HFTemplate(tokenizer, template), HFTokenizer(tokenizer), settings=settings(), eyes=eyes)
    for order in orders():
        parts = parts_of(order)
        talk = [{"role": "user", "content": parts}]
        images = [part["image"] for part in parts if part["type"] == "image"]
        theirs = prepare_inputs(processor, images, prompts=render(talk, more=True))["input_ids"].tolist()[0]
        message, pictures = as_message(parts)
        ours = pipe.prepare(request([message], pictures=pictures), thinking=True).prompt
        assert [pad if token >= FIRST_IMAGE_ID else token for token in ours.tokens] == theirs, order
        assert len(ours.images) == len(images)
