"""Loads a checkpoint with its eyes, by mlx-vlm. Runs on the model thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from start_llm.core.errors import NotSupported
from start_llm.models.eyes import ProcessorEyes, image_text, processor_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seeing:
    """
    Attributes:
        model: mlx-vlm's; `engine.vision` gives it the shape of a text model.
        wrapper: mlx-lm's tokenizer.
    """

    model: Any
    wrapper: Any
    eyes: ProcessorEyes


def has_eyes(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm knows the model as one with a vision part, by its ``config.json`` alone."""
    kind = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict) or not isinstance(kind, str) or config.get("model_file"):
        return False
    from mlx_vlm.utils import MODEL_REMAPPING  # noqa: PLC0415 - takes a second, and most models need it not

    return find_spec(f"mlx_vlm.models.{MODEL_REMAPPING.get(kind, kind)}") is not None


def load_seeing(folder: Path, config: Mapping[str, Any], tokenizer: Callable[[Path, Any], Any]) -> Seeing:
    """Raises NotSupported: it cannot be loaded with its eyes (it may still be loaded as a text model).

    Args:
        tokenizer: see `loader.Given`.
    """
    from mlx_vlm.utils import load  # noqa: PLC0415 - as above

    try:
        model, processor = load(str(folder))
        wrapper = tokenizer(folder, config.get("eos_token_id"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError, RuntimeError) as error:
        raise NotSupported(f"mlx-vlm cannot load it: {type(error).__name__}: {str(error)[:300]}") from error
    pad = next((config[name] for name in ("image_token_id", "image_token_index") if config.get(name) is not None), None)
    if not isinstance(pad, int):
        raise NotSupported("its config names no image token")
    inner = wrapper._tokenizer

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
        except Exception as error:  # a template can fail in every way that code can
            raise NotSupported(f"its chat template does not show images: {error}") from error

    eyes = ProcessorEyes(processor, text=image_text(render), pad=pad, name=processor_name(folder))
    eyes.places(64, 64)  # what the processor cannot do shows now, and not at the first image
    return Seeing(model, wrapper, eyes)
