"""Prompts without a template begin as the tokenizer's own rule says."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from start_llm.prompt.hf import HFTokenizer


def tokenizer(rule: str | None) -> HFTokenizer:
    core = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    if rule is not None:
        core.post_processor = processors.TemplateProcessing(rule, special_tokens=[("<s>", 0), ("</s>", 1)])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), [])


@pytest.mark.parametrize(
    ("rule", "text", "tokens"),
    [
        (None, "a b", [2, 3]),
        ("<s> $A", "a b", [0, 2, 3]),
        ("<s> $A", "<s> a", [0, 2]),  # it is there already
        ("<s> $A", "", [0]),
        ("<s> $A </s>", "a b", [0, 2, 3]),  # what ends a text does not end a prompt
        ("$A </s>", "a b", [2, 3]),
    ],
)
def test_a_raw_prompt_has_the_first_token_once(rule: str | None, text: str, tokens: list[int]) -> None:
    assert tokenizer(rule).encode_raw(text) == tokens
