"""Grammars over a byte vocabulary, so that only the grammar matters; no model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from start_llm.core.messages import Tool
from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.core.request import ChatRequest, ResponseFormat
from start_llm.core.work import Constraint
from start_llm.parsing.structured import ModelText, make_constraint, model_text
from tests.parsing.formats import RENDER

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>")
MARKERS += ("<arg_value>", "</arg_value>", "]<]minimax[>[", "<|content_invoke_tool_json|>", "<|end_message|>")
for name in ("tool_calls", "tool_call", "arg_key", "arg_value"):
    MARKERS += (f"<ifm|{name}>", f"</ifm|{name}>", f"<{name}:opensource>", f"</{name}:opensource>")
EOS = "<|eos|>"


def byte_tokenizer(*special: str) -> Tokenizer:
    vocab = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, *special)])
    return backend


class Vocabulary:
    """A tokenizer, and what grammars accept in it."""

    def __init__(self, *special: str) -> None:
        self.backend = byte_tokenizer(*special)
        self.special = {text: self.backend.token_to_id(text) for text in special}
        self.tokenizer = LLTokenizer(self.backend.to_str(), eos_token=self.backend.token_to_id(EOS))

    def model_text(self, tool_format: str, reasoning: str) -> ModelText:
        """Of a model with this vocabulary."""
        added = {i: AddedToken(text, special=True) for text, i in self.special.items()}
        fake = SimpleNamespace(
            added_tokens_decoder=added, encode=lambda text, add_special_tokens: self.backend.encode(text).ids
        )
        return model_text(tool_format, REASONING_STYLES[reasoning], fake)

    def accepts(self, constraint: Constraint | None, text: str) -> bool:
        """Whether `text` is a complete answer."""
        matcher = self.feed(constraint, text)
        return matcher is not None and bool(matcher.is_accepting())

    def begins(self, constraint: Constraint | None, text: str) -> bool:
        """Whether an answer may begin with `text`."""
        return self.feed(constraint, text) is not None

    def feed(self, constraint: Constraint | None, text: str) -> Any:
        assert constraint is not None
        matcher = LLMatcher(self.tokenizer, constraint.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.backend.encode(text).ids
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None


TOKENS = Vocabulary(*MARKERS)  # markers are tokens
BYTES = Vocabulary()  # markers are text
BOTH = pytest.mark.parametrize("words", [TOKENS, BYTES], ids=["tokens", "text"])

WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
PING = Tool("ping")
STRICT = Tool("get_weather", "", WEATHER.parameters, strict=True)
OBJECT = ResponseFormat("json_object")


def constraint(
    words: Vocabulary, tool_format: str = "hermes_json", reasoning: str = "null", **fields: Any
) -> Constraint | None:
    where = {key: fields.pop(key) for key in ("in_reasoning", "may_reason") if key in fields}
    request = ChatRequest(**({"id": "x", "dialect": "chat", "model": "m"} | fields))
    return make_constraint(request, words.model_text(tool_format, reasoning), **where)


_CALL = [("get_weather", {"city": "Ulm", "days": 2})]
GOOD = {name: RENDER[name](_CALL) for name in ("hermes_json", "qwen3_coder", "glm47", "llama_xml")}
GOOD["glm47"] = GOOD["glm47"].replace("\n", "")
GOOD["llama"] = '{"name": "get_weather", "parameters": {"city": "Ulm", "days": 2}}'
GOOD |= {name: RENDER[name](_CALL) for name in ("deepseek_v4", "minimax_m3")}
_IFM = GOOD["glm47"].replace("tool_call", "ifm|tool_call").replace("arg_", "ifm|arg_")
GOOD["k2_horizon"] = f"<ifm|tool_calls>\n{_IFM}\n</ifm|tool_calls>"
GOOD["inkling"] = RENDER["inkling"](_CALL).removeprefix("<|message_model|>get_weather")
GOOD["json_tools"] = GOOD["something_else"] = GOOD["hermes_json"]
GOOD["glm4_xml"] = GOOD["glm4_native"] = GOOD["glm47"]
