"""Tiny vision checkpoints on disk, with tokenizer, template and processor: what `MODEL_PATH` may name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from mlx_vlm.utils import get_model_and_args, save_weights, update_module_configs
from tokenizers import AddedToken

from tests.engine.vision_zoo import CONFIGS
from tests.models.architectures import with_weights
from tests.oracle import make_tokenizer

SPECIAL = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
CONTEXT = 32768
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_GEMMA_IMAGE = "<start_of_image>"
_TEMPLATE = r"""{%- macro render(content) -%}
{%- if content is string -%}{{ content }}{%- elif content -%}
{%- for part in content -%}{{ part.text if part.type == 'text' else 'IMAGE' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' -}}
{{- '<tool_response>\n' if message.role == 'tool' else '' -}}
{{- render(message.content) -}}
{{- '\n</tool_response>' if message.role == 'tool' else '' -}}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
"""Tools are shown by the server itself: the template knows none."""


def processor_settings(family: str) -> dict[str, Any]:
    """What stands in ``preprocessor_config.json``."""
    if family == "gemma3":
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
            "rescale_factor": 1 / 255,
            "resample": 2,
            "size": {"height": 112, "width": 112},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "image_seq_length": 16,
        }
    patch = CONFIGS[family]["vision_config"]["patch_size"]
    least, most = (2 * patch) ** 2 * 4, (2 * patch) ** 2 * 64
    old = family == "qwen2_5_vl"
    return {
        "image_processor_type": "Qwen2VLImageProcessor" if old else "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen2_5_VLProcessor" if old else "Qwen3VLProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": least, "longest_edge": most},
        **({"min_pixels": least, "max_pixels": most} if old else {}),
    }


def _config(family: str, ids: dict[str, int], vocabulary: int) -> dict[str, Any]:
    config = {"model_type": family, **copy.deepcopy(CONFIGS[family]), "vocab_size": vocabulary}
    names = {
        "image_token_id": "<image_soft_token>" if family == "gemma3" else "<|image_pad|>",
        "image_token_index": "<image_soft_token>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    config |= {name: ids[token] for name, token in names.items() if name in config}
    config |= {"eos_token_id": 3, "pad_token_id": 0, "dtype": "float32", "max_position_embeddings": CONTEXT}
    if "text_config" in config:
        config["text_config"] |= {"vocab_size": vocabulary, "eos_token_id": 3, "max_position_embeddings": CONTEXT}
    return config


def named_tokens(family: str) -> dict[str, str]:
    """The image tokens by the names that processors look for."""
    if family == "gemma3":
        return {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def build_vision(folder: Path, family: str) -> Path:
    """Writes a checkpoint with random float32 weights into `folder` (made if needed) and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    gemma = family == "gemma3"
    named = named_tokens(family)
    template = _TEMPLATE.replace("IMAGE", _GEMMA_IMAGE if gemma else _QWEN_IMAGE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "unk_token": None,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **named,
        **({"extra_special_tokens": named} if gemma else {}),
    }
    processor = processor_settings(family)
    about = {"processor_class": processor["processor_class"], **({"image_seq_length": 16} if gemma else {})}
    config = _config(family, ids, tokenizer.get_vocab_size())
    files = {
        "tokenizer_config.json": settings,
        "preprocessor_config.json": processor,
        "processor_config.json": about,
        "config.json": config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "chat_template.jinja").write_text(template)
    module, _ = get_model_and_args(config)
    config.setdefault("text_config", {})
    made = update_module_configs(module.ModelConfig.from_dict(config), module, config, ["text", "vision"])
    save_weights(folder, with_weights(module.Model(made), 7))
    return folder
