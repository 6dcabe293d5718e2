"""A random llama with a byte-level tokenizer, small enough to be made in every test run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import architectures

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]")
PLAIN = ("<tool_call>", "</tool_call>", "[not-special]")
MERGED = ('{"', '":', '",', '"}', "true", "false", "null", "name", "arguments", "function", "parameter", " the", "[{")


@dataclass(frozen=True)
class Job:
    """One row: what `BatchGenerator.insert` takes."""

    prompt: Sequence[int]
    sampler: Callable[[mx.array], mx.array]
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = ()
    max_tokens: int = 24


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merged words, special tokens, and tool markers that are added but not special."""
    vocab = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in MERGED:
        text = word.replace(" ", "Ġ")
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")


def make_model(vocab_size: int) -> Any:
    """Whose distributions are neither flat nor certain."""
    return architectures.make("llama", vocab_size=vocab_size)


def run(model: Any, jobs: Sequence[Job], stop: Sequence[int] = ()) -> list[tuple[list[int], str]]:
    """All jobs in one batch: (tokens, finish reason) in order."""
    generator = BatchGenerator(model, stop_tokens=[[token] for token in stop])
    uids = generator.insert(
        [list(job.prompt) for job in jobs],
        max_tokens=[job.max_tokens for job in jobs],
        samplers=[job.sampler for job in jobs],
        logits_processors=[list(job.processors) for job in jobs],
    )
    found: list[tuple[list[int], str]] = collect(generator, uids)
    return found


def collect(generator: BatchGenerator, uids: Sequence[int], on: Callable[[Any], None] | None = None) -> Any:
    out: dict[int, list[int]] = {uid: [] for uid in uids}
    reasons: dict[int, str] = {}
    while len(reasons) < len(uids):
        for response in generator.next()[1]:
            out[response.uid].append(response.token)
            if on is not None:
                on(response)
            if response.finish_reason is not None:
                reasons[response.uid] = response.finish_reason
    return [(out[uid], reasons[uid]) for uid in uids]
