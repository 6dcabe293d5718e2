"""What a tiny model's stored KV takes, and what a conversation with forks computes. For `scripts/architectures.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from start_llm.engine.checks import check_decoding
from start_llm.engine.decode.batch import eval_cache
from start_llm.kvcache.blocks import as_tokens, common_prefix
from start_llm.kvcache.layers import LayerKit
from start_llm.models.background import at_once
from start_llm.models.capabilities import DecodingCheck
from tests.models.architectures import VOCAB
from tests.models.decode_everywhere import LONG, engine, model_of

NEW_TYPES = (
    *("qwen4_exp", "deepseek_v4", "deepseek_v41", "glm5_next", "hy_v4"),
    *("k2_horizon", "inkling", "minimax_m3", "kimi_k3", "muse_spark"),
)
LENGTHS = (2048, 8192, 32768)
TURNS, FORKS = 12, {4: 2, 7: 1, 10: 3}
"""Before these turns so many turns are taken back."""
_CHUNK = 512


def words(length: int, seed: int = 0) -> list[int]:
    return [5 + (7 * place + place * place // (11 + seed) + 13 * seed) % (VOCAB - 11) for place in range(length)]


def sizes(name: str, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Bytes of a checkpoint at each length, and of the rows of a token there, beside what the columns say."""
    model = model_of(name)
    cache, found = list(make_prompt_cache(model)), dict[str, Any]({"name": name, "checkpoint": [], "token": []})
    kit, text, held = LayerKit(lambda: list(make_prompt_cache(model))), words(max(lengths)), 0
    for length in lengths:
        while held < length:
            stop = min(held + _CHUNK, length)
            model(mx.array([text[held:stop]]), cache=cache)
            eval_cache(cache)
            held = stop
        rows = kit.slice(cache, 0, length)
        found["checkpoint"].append(kit.checkpoint(cache).nbytes)
        found["token"].append(rows.nbytes / length)
        found["columns"] = sum(
            a.nbytes / a.shape[-2] / form.rate
            for layer, form in zip(rows.arrays, rows.forms, strict=True)
            for a in layer
            if a.shape[-2]
        )
    return found


def conversation(name: str, turns: int = TURNS) -> dict[str, Any]:
    """Prompt tokens computed and new over a conversation of turns with forks."""
    model = model_of(name)
    check = at_once(check_decoding(model, lambda: list(make_prompt_cache(model)), LONG)) or DecodingCheck()
    messages, seen = [words(260)], list[list[int]]()
    new = computed = 0
    with tempfile.TemporaryDirectory() as folder, engine(name, model, check, Path(folder)) as served:
        for turn in range(turns):
            if taken := FORKS.get(turn):
                del messages[-2 * taken :]
            messages.append(words(60, turn + 1))
            prompt = [token for message in messages for token in message]
            ends = [sum(map(len, messages[:count])) for count in range(1, len(messages))]
            ((answer, reused),) = served.say(prompt, boundaries=ends)
            known = max((common_prefix(as_tokens(prompt), as_tokens(earlier)) for earlier in seen), default=0)
            new, computed = new + len(prompt) - known, computed + len(prompt) - reused
            messages.append(answer)
            seen.append([*prompt, *answer])
    return {"name": name, "computed": computed, "new": new}
