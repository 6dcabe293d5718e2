"""Writes tiny random checkpoints that can be divided by two and by three hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from tests.engine.tiny import make_tokenizer
from tests.engine.zoo import QWEN35
from tests.models.architectures import TEXT

VOCABULARY = 300
_PLAIN: dict[str, Any] = {
    **TEXT,
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
}
_HYBRID = {**QWEN35, **_PLAIN, "model_type": "qwen3_5_text", "head_dim": 32}
_HYBRID |= {"linear_num_value_heads": 6, "linear_num_key_heads": 6}
CONFIGS = {"plain": _PLAIN, "hybrid": {"model_type": "qwen3_5", "text_config": _HYBRID}}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(folder: Path, kind: Literal["plain", "hybrid"], **changed: Any) -> Path:
    """Float32, with weights that make the greedy text varied; the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[kind], "eos_token_id": 1, **changed}
    model_class, arguments = _get_classes(config)
    mx.random.seed(5)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(lambda each: each * 3 if each.ndim == 2 else each, model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
