"""Reads a checkpoint's tokenizer, as mlx-lm does, but its large parts once only.

A tokenizer of 250,000 tokens takes seconds to read on a slow core, most of them with Python's lock held, so that no
model decodes meanwhile. mlx-lm reads ``tokenizer.json`` a second time for one word in it, and has the whole vocabulary
copied each time that it looks for a token.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm import tokenizer_utils as mlx_tokenizers
from mlx_lm.utils import _tokenizer_defaults, load_config
from transformers import AutoTokenizer

from start_llm.models.capabilities import WritingHints, read_hints
from start_llm.models.catalog import OLDER_TEMPLATE
from start_llm.models.checkpoint import read_json
from start_llm.parsing.registry import TOOL_FORMATS


def read_tokenizer(folder: Path) -> Any:
    """mlx-lm's tokenizer; it computes nothing. Any thread.

    Raises OSError, ValueError, KeyError: there is none, or none that transformers knows.
    """
    defaults = _tokenizer_defaults(folder) or {}
    eos = end_tokens(folder) or defaults.get("eos_token_ids")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _older_template(folder)
    _keep_vocabulary(tokenizer)
    given = tokenizer.init_kwargs
    template, answers = _own_template(given, defaults, has_one=tokenizer.chat_template is not None)
    parser = given.get("tool_parser_type", defaults.get("tool_parser_type"))
    if parser is None:
        parser = mlx_tokenizers._infer_tool_parser(tokenizer)
    tools: Any = None
    if parser is not None:
        tools = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        given["tool_parser_type"] = parser
    return mlx_tokenizers.TokenizerWrapper(
        tokenizer,
        _detokenizer(tokenizer),
        eos_token_ids=[eos] if isinstance(eos, int) else eos,
        chat_template=template,
        tool_parser=None if tools is None else tools.parse_tool_call,
        tool_call_start=None if tools is None else tools.tool_call_start,
        tool_call_end=None if tools is None else tools.tool_call_end,
        response_format=answers,
    )


def writing_hints(wrapper: Any) -> WritingHints:
    """What shows of how the model writes. `wrapper`: as of `read_tokenizer`. Any thread."""
    tokenizer = wrapper._tokenizer
    tags = (wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None
    found = wrapper.init_kwargs.get("tool_parser_type") or "json_tools" if wrapper.has_tool_calling else None
    hints = read_hints(
        found if found in TOOL_FORMATS else None, tokenizer.get_vocab(), tags, str(tokenizer.chat_template or "")
    )
    return replace(hints, template=bool(wrapper.has_chat_template))


def _older_template(folder: Path) -> str | None:
    """The chat template in ``chat_template.json``, where older models that see keep it. Raises ValueError: damaged."""
    path = folder / OLDER_TEMPLATE
    read = read_json(path) if path.is_file() else None
    text = read.get("chat_template") if isinstance(read, dict) else None
    return text if isinstance(text, str) else None


def end_tokens(folder: Path) -> int | list[int] | None:
    """``eos_token_id``, as mlx-lm reads it: ``generation_config.json`` counts more than ``config.json``."""
    return load_config(folder).get("eos_token_id") if (folder / "config.json").is_file() else None


def _keep_vocabulary(tokenizer: Any) -> None:
    """Who asks for the vocabulary gets the same one each time: it is not to be changed.

    transformers makes it anew, which holds Python's lock for 0.4 s if there are 250,000 tokens. This loop does not.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    vocabulary = {text: index for index, text in enumerate(texts) if text is not None}
    if len(vocabulary) == len(tokenizer):  # else two tokens have one text, or numbers are left out
        tokenizer.get_vocab = lambda: vocabulary


def _own_template(
    given: dict[str, Any], defaults: dict[str, Any], *, has_one: bool
) -> tuple[Callable[..., Any] | None, Any]:
    """mlx-lm's template in code, where the checkpoint or the model's module names one; and the form of its answers."""
    name = given.get("chat_template_type", defaults.get("chat_template_type"))
    if not name:
        return None, None
    module = importlib.import_module(f"mlx_lm.chat_templates.{name}")
    wanted = "chat_template_type" in given or not has_one
    return (module.apply_chat_template if wanted else None), getattr(module, "RESPONSE_FORMAT", None)


def _detokenizer(tokenizer: Any) -> Any:
    """The quickest that fits how the tokenizer decodes."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = None if decoder is None else json.loads(decoder.__getstate__())
    if mlx_tokenizers._is_spm_decoder(state):
        return mlx_tokenizers.SPMStreamingDetokenizer
    if mlx_tokenizers._is_spm_decoder_no_space(state):
        return partial(mlx_tokenizers.SPMStreamingDetokenizer, trim_space=False)
    if mlx_tokenizers._is_bpe_decoder(state):
        return mlx_tokenizers.BPEStreamingDetokenizer
    return mlx_tokenizers.NaiveStreamingDetokenizer
