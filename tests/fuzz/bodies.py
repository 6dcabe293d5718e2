"""Bodies of every dialect out of a string of bytes: what a client would send, with something else in some places.

Hypothesis draws the bytes, and `Tape` turns them into choices, one byte each. That is ten times quicker than a strategy
for every field, and still shrinks: a tape of zeros, or one that has run out, makes the first choice everywhere, which
is the plainest body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Make = Callable[["Tape"], Any]
Fields = dict[str, Make]

STRANGE = 60
"""One field in so many is anything at all."""


class Tape:
    """Choices, read from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, most: int) -> int:
        """A number from 0 to `most` - 1, at most 255."""
        byte = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return byte % most

    def pick[T](self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


DEEP_TEXT = '{"a":' * 3_000 + "1" + "}" * 3_000
NUMBERS = [
    1,
    0,
    -1,
    2,
    5,
    64,
    65,
    4096,
    10**6,
    2**31,
    2**63,
    -(2**63),
    2**64,
    10**60,
    10**400,
    0.5,
    1.0,
    -0.0,
    1e-300,
    1e300,
]
TEXTS = [
    "Hi", "", " ", "x", "none", "auto", "text", "type", "user", "null", "true", "0", "\x00", "é", "\U0001f600",
    "\ud83d",
    "<think>", "</think>", "<tool_call>", "<|im_end|>", "<|im_start|>", "[[truth]]", "{", "{}", "[]", "NaN", "5",
    "-1", "f",
    '{"a": 1}', '{"session_id": 5}', DEEP_TEXT, "9" * 5_000, "read", "a\nb", "../../x", "{{ 1/0 }}", "%s%n", "x" * 600,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, [], {}, [[]], [{}], [None], {"": None}, {"type": "none"}, {"type": ["text"]}, {"type": {"a": 1}},
    ["a", 1, None], {"a": {"b": []}}, deep(40), [deep(40)], [0] * 300, {str(i): i for i in range(120)}, [[[]]], [""],
]  # fmt: skip
NAMES = ["type", "text", "name", "role", "content", "id", "function", "a", ""]


def leaf(tape: Tape) -> Any:
    return tape.pick(tape.pick((VALUES, NUMBERS, TEXTS)))


def anything(tape: Tape) -> Any:
    kind = tape.below(6)
    if kind == 4:
        return [leaf(tape) for _ in range(tape.below(4))]
    if kind == 5:
        return {tape.pick(NAMES): leaf(tape) for _ in range(tape.below(4))}
    return leaf(tape)


def field(*valid: Make) -> Make:
    """Mostly valid."""

    def make(tape: Tape) -> Any:
        return anything(tape) if tape.below(STRANGE) == STRANGE - 1 else tape.pick(valid)(tape)

    return make


def one(*values: Any) -> Make:
    return field(lambda tape: tape.pick(values))


def some(make: Make, most: int = 3, least: int = 0) -> Make:
    """A list."""
    return field(lambda tape: [make(tape) for _ in range(least + tape.below(most - least + 1))])


def record(required: Fields, optional: Fields | None = None, most: int = 3) -> Make:
    """An object that mostly has its required members, and at most `most` of the optional ones."""
    names = sorted(optional or ())

    def make(tape: Tape) -> Any:
        made = {name: make(tape) for name, make in required.items() if tape.below(120) != 119}
        for _ in range(tape.below(most + 1) if names else 0):
            name = tape.pick(names)
            made[name] = (optional or {})[name](tape)
        return made

    return field(make)


def mapping(names: Sequence[str], make: Make, most: int = 3) -> Make:
    return field(lambda tape: {tape.pick(names): make(tape) for _ in range(tape.below(most + 1))})


text = one(*TEXTS)
plain = one("Hi", "a longer text, with words", "", "x\ny")
name = one("f", "g", "read", "n__f", "x" * 64, "a b")
number = one(*NUMBERS)
unit = one(0.5, 0, 1, 0.0, 1.0, 1e-300)
count = one(1, 5, 64, 10**6, 2**40)
flag = one(True, False)

# --- schemas ---

TYPES = [
    "object",
    "string",
    "array",
    "number",
    "integer",
    "boolean",
    "null",
    ["string", "null"],
    "none",
    "any",
    "String",
    [],
]
REFS = ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://x/y", "#/nowhere", "", "#a", "#/$defs/%", 5]
PATTERNS = ["a*", "^a$", "(", "(?=a)", "a{1000}", "(a+)+$", "\\b", "[", "\\p{L}", "^(a|b)$", "x{0,100000}", "\\d", "."]
KEYWORDS: Fields = {
    "enum": some(lambda tape: tape.pick([1, "a", None, [], {}, "</arg_value>", 10**60])),
    "const": leaf, "$ref": one(*REFS), "minimum": number, "maximum": number, "multipleOf": number, "minLength": number,
    "maxLength": number, "minItems": number, "maxItems": number, "minProperties": number, "exclusiveMinimum": number,
    "pattern": one(*PATTERNS), "format": one("date", "date-time", "uri", "email", "nothing"), "title": text,
    "required": some(one("a", "b", "c", 1)), "description": text, "default": anything, "unknownKeyword": anything,
    "$schema": one("http://json-schema.org/draft-07/schema#", "x"), "uniqueItems": flag, "$id": text, "$anchor": text,
    "x-guidance": anything,
}  # fmt: skip


def schema(tape: Tape, depth: int = 3) -> Any:
    return (_leaf_schema if depth == 0 else _NESTED[depth])(tape)


def _nested(depth: int) -> Make:
    inner: Make = lambda tape: schema(tape, depth - 1)  # noqa: E731 - one of many such
    named, several = mapping(["a", "b", "", "a b", "é", "<x>"], inner), some(inner)
    nested: Fields = {
        "properties": named, "$defs": named, "definitions": named, "patternProperties": named,
        "dependentSchemas": named,
        "items": inner, "additionalProperties": field(inner, flag), "not": inner, "if": inner, "then": inner,
        "contains": inner, "anyOf": several, "oneOf": several, "allOf": several, "prefixItems": several,
        "propertyNames": inner,
    }  # fmt: skip
    return record({"type": one(*TYPES)}, KEYWORDS | nested)


_leaf_schema = record({"type": one(*TYPES)}, KEYWORDS, most=2)
_NESTED = {depth: _nested(depth) for depth in (1, 2, 3)}
_object_schema = record(
    {"type": one("object"), "properties": mapping(["a", "path", "b"], lambda tape: schema(tape, 2))}
)
object_schema = field(_object_schema, _object_schema, _object_schema, schema)
ARGUMENTS = [
    '{"a": 1}',
    "{}",
    "",
    "[]",
    "null",
    "{",
    '{"a": NaN}',
    DEEP_TEXT,
    "9" * 5_000,
    '{"a": 1e999}',
    '"x"',
    '{"a":"\\ud83d"}',
]
arguments = field(lambda tape: tape.pick(ARGUMENTS), mapping(["a", "path"], leaf, 2))
tool_input = mapping(["a", "path"], anything, 2)

# --- what the dialects share ---

VARIABLES = [
    "enable_thinking", "messages", "tools", "add_generation_prompt", "bos_token", "a", "clock", "tokenize",
    "pinned_dates",
    "chat_template", "strftime_now", "documents", "continue_final_message", "conversation", "return_dict",
    "return_tensors",
]  # fmt: skip
sampling: Fields = {
    "temperature": unit, "top_p": unit, "top_k": count, "min_p": unit, "repetition_penalty": unit, "seed": number,
    "repetition_context_size": count, "presence_penalty": unit, "frequency_penalty": unit,
    "logit_bias": mapping(["0", "1", "-1", "9" * 5_000, "a", "²", ""], field(one(1, -100, 0.5, 101), number), 2),
    "max_tokens": count, "stream": flag, "user": text, "session_id": text, "prompt_cache_key": text, "thread_id": text,
    "stop": field(text, some(text)), "n": one(1, 2, 3),
    "metadata": record({}, {"session_id": text, "user_id": text, "thinking": anything, "a": anything}),
    "extra_body": record({}, {"chat_template_kwargs": anything, "session_id": text, "reasoning": anything}),
    "chat_template_kwargs": mapping(VARIABLES, anything, 2),
    "thinking": one({"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, True, "high", {"type": ["a"]}),
    "reasoning_effort": one("low", "high", "none"), "enable_thinking": flag, "unknown": anything,
    "reasoning": one({"effort": "low", "summary": "auto"}, {"enabled": False}, "high"),
    "stream_options": record({}, {"include_usage": flag}),
}  # fmt: skip
response_format = field(
    lambda tape: {"type": "text"},
    lambda tape: {"type": "json_object"},
    lambda tape: {"type": "json_schema", "json_schema": {"schema": schema(tape), "name": text(tape)}},
    lambda tape: {"type": "json_schema", "schema": object_schema(tape)},
)

# --- chat completions ---

part = record(
    {"type": one("text", "input_text", "refusal", "thinking", "image_url", "audio"), "text": text}, {"thinking": text}
)
content = field(plain, text, some(part))
call = record(
    {"function": record({"name": name, "arguments": arguments})},
    {"id": text, "type": one("function"), "custom": anything},
    most=1,
)
message = record(
    {"role": one("user", "assistant", "system", "tool", "developer", "function"), "content": content},
    {
        "tool_calls": some(call, 2), "tool_call_id": text, "name": text, "reasoning_content": text,
        "reasoning": anything,
        "thinking_blocks": anything, "refusal": text, "function_call": anything,
    },
    most=2,
)  # fmt: skip
function = record({"name": name, "parameters": object_schema}, {"description": text, "strict": flag})
tool = field(record({"type": one("function"), "function": function}), record({"type": one("function"), "name": name}))
chosen = one(
    "auto", "none", "required", "any", {"type": "function", "function": {"name": "f"}}, {"type": ["function"]},
    {"type": {}},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, {"type": "auto"},
    {"type": "allowed_tools", "tools": [5]}, {"type": "allowed_tools", "allowed_tools": {"mode": {}, "tools": []}},
)  # fmt: skip
chat = record(
    {"model": one("default", "gpt-5"), "messages": some(message, 4, 1)},
    sampling
    | {
        "tools": some(tool, 2, 1), "tool_choice": chosen, "functions": some(function, 2), "function_call": chosen,
        "response_format": response_format, "max_completion_tokens": count, "best_of": count, "modalities": anything,
        "parallel_tool_calls": flag, "logprobs": flag, "top_logprobs": one(1, 20),
    },
    most=4,
)  # fmt: skip

# --- completions ---

completions = record(
    {"model": one("default"), "prompt": field(plain, text, some(one(1, 2, 300), 4, 1), some(text, 3, 1))},
    sampling | {"echo": flag, "suffix": text, "best_of": number, "logprobs": one(1, 5)},
)

# --- Anthropic messages ---

SOURCES = [{"type": "text", "data": "x"}, {"type": ["text"]}, {"type": {}}, {"type": "content", "content": [5]}]
CHOICES = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": ["any"]}, {"type": {}}]
BLOCKS = ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "search_result", "image"]
block = record(
    {"type": one(*BLOCKS), "text": text, "id": text, "name": name, "input": tool_input, "tool_use_id": text,
    "thinking": text},
    {
        "source": one(*SOURCES),
        "content": content, "is_error": flag, "title": text, "signature": text, "cache_control": anything, "data": text,
        "tool_name": text,
    },
)  # fmt: skip
anthropic_content = field(plain, text, some(block))
anthropic_tool = record(
    {"name": name, "input_schema": object_schema},
    {"type": one("custom", "web_search_20250305", "tool_search_tool_x"), "description": text, "strict": flag},
    most=1,
)
messages = record(
    {
        "model": one("default", "claude-x"),
        "max_tokens": count,
        "messages": some(record({"role": one("user", "assistant", "system"), "content": anthropic_content}), 4, 1),
    },
    sampling
    | {
        "system": anthropic_content, "tools": some(anthropic_tool, 2, 1), "stop_sequences": field(some(text), anything),
        "tool_choice": one(*CHOICES),
        "output_config": record({}, {"effort": text, "format": response_format}), "output_format": response_format,
    },
    most=4,
)  # fmt: skip

# --- Responses ---

ITEMS = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "agent_message", "additional_tools", "web_search_call",
]  # fmt: skip
responses_tool = field(
    tool,
    record({"type": one("function"), "name": name, "parameters": object_schema}, {"strict": flag, "description": text}),
    record({"type": one("custom"), "name": name}, {"format": anything, "description": text}),
    record({"type": one("namespace"), "name": name, "tools": some(tool, 2)}, {"description": text}),
    record({"type": one("web_search", "mcp", "local_shell")}, {"server_label": text}),
)
item = record(
    {
        "type": one(*ITEMS), "role": one("user", "assistant", "developer", "system"), "content": content,
        "call_id": text,
        "name": name, "arguments": arguments, "input": text, "output": content,
    },
    {
        "id": text, "summary": anything, "encrypted_content": text, "namespace": text, "action": anything,
        "status": text,
        "tools": some(responses_tool, 2),
    },
)  # fmt: skip
responses = record(
    {"model": one("default"), "input": field(plain, text, some(item, 4, 1))},
    sampling
    | {
        "instructions": text, "tools": some(responses_tool, 2, 1), "tool_choice": chosen, "store": flag,
        "previous_response_id": text, "text": field(lambda tape: {"format": response_format(tape)}),
        "include": one(["reasoning.encrypted_content"], ["message.output_text.logprobs"], [5], [[]]),
        "truncation": one("auto", "disabled"), "max_output_tokens": count, "max_tool_calls": number,
        "top_logprobs": one(1, 9),
        "parallel_tool_calls": flag, "background": flag, "conversation": anything, "prompt": anything,
        "service_tier": text,
    },
    most=4,
)  # fmt: skip

BY_PATH: list[tuple[str, Make]] = [
    ("/v1/chat/completions", chat),
    ("/v1/messages", messages),
    ("/v1/responses", responses),
    ("/v1/completions", completions),
    ("/v1/chat/completions", chat),
    ("/v1/messages", messages),
    ("/v1/responses", responses),
    ("/v1/messages/count_tokens", messages),
    ("/v1/responses/input_tokens", responses),
    ("/v1/cache/explain", lambda tape: tape.pick([chat, completions, messages, responses])(tape)),
]

# --- what a model may say ---

CALLED = ["f", "g", "read", "zzz"]
SAID = [
    '{"a": 1}',
    '{"a": "1", "b": [1e400]}',
    "{",
    '{"input": "x"}',
    '{"path": null}',
    "[5]",
    '{"a": {"b": [1, "x"]}}',
]
LONG = ['{"a": ' + "9" * 4_400 + "}", '{"a":' * 1_200 + "1" + "}" * 1_200]
WORDS = [
    "Hello. ", "<think>\n", "\n</think>\n", "```json\n", '{"a": 1}', "<tool_call>", "<function=f>", "\x00", "é", "[",
    "",
    "\U0001f600", "x" * 300, "</tool_call>", "<|im_start|>", "NaN", "\n\n",
]  # fmt: skip


def answer(tape: Tape) -> str:
    said = []
    for _ in range(tape.below(4)):
        if tape.below(3):
            arguments = tape.pick(LONG) if tape.below(100) == 99 else tape.pick(SAID)
            said.append(f'<tool_call>\n{{"name": "{tape.pick(CALLED)}", "arguments": {arguments}}}\n</tool_call>')
        else:
            said.append(tape.pick(WORDS))
    return "".join(said)


def request(data: bytes) -> tuple[str, bytes, str]:
    """(path, body, what the model says)."""
    tape = Tape(data)
    said = answer(tape)
    path, make = tape.pick(BY_PATH)
    return path, json.dumps(make(tape)).encode(), said
