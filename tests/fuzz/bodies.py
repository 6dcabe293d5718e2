"""Bodies of every dialect, see `tape`: what clients send, with something else in some places."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from itertools import chain
from typing import Any

from start_llm.api.anthropic.messages import MessageIn, MessagesBody, OutputConfig
from start_llm.api.common.fields import BodyModel
from start_llm.api.common.request import FIELDS as THINKING
from start_llm.api.http.access import USER_FIELDS
from start_llm.api.media.audio import SpeechBody, TranscriptionBody
from start_llm.api.media.embeddings import EmbeddingsBody
from start_llm.api.openai.chat import ChatBody, ChatMessage, CompletionBody, StreamOptions
from start_llm.api.openai.responses import REFUSED, ResponsesBody
from start_llm.api.openai.responses_items import INSTEAD, KNOWN
from start_llm.api.openai.responses_stream import seal
from start_llm.api.table import CHAT_FIELDS, MESSAGES_FIELDS
from start_llm.core.protocol import SESSION_FIELDS
from tests.fuzz.tape import (
    DEEP_TEXT,
    NUMBERS,
    TEXTS,
    Fields,
    Make,
    Record,
    Tape,
    anything,
    field,
    leaf,
    mapping,
    one,
    some,
)

LAST = "the-id-of-the-last-response"
"""Stands for that id, in bodies and paths: the tests put it in."""

text = one(*TEXTS)
plain = one("Hi", "a longer text, with words", "", "x\ny")
name = one("f", "g", "read", "n__f", "x" * 64, "a b")
number = one(*NUMBERS)
unit = one(0.5, 0, 1, 0.0, 1.0, 1e-300)
count = one(1, 5, 64, 10**6, 2**40)
flag = one(True, False)
asked = one(*["default"] * 30, "gpt-5", "claude-x", "oracle-two", "nobody", "")
"""Mostly the model that is loaded: another one comes and goes now and then."""


def read(model: type[BodyModel], *more: Iterable[str]) -> Fields:
    """Every field that is read is sent, also one that is new and has no better values."""
    return dict.fromkeys(chain(model.model_fields, *more), anything)


# --- schemas ---

TYPES = [
    "object", "string", "array", "number", "integer", "boolean", "null", ["string", "null"], "none", "any", "String",
    [],
]  # fmt: skip
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
        "dependentSchemas": named, "items": inner, "additionalProperties": field(inner, flag), "not": inner,
        "if": inner, "then": inner, "contains": inner, "anyOf": several, "oneOf": several, "allOf": several,
        "prefixItems": several, "propertyNames": inner,
    }  # fmt: skip
    return Record({"type": one(*TYPES)}, KEYWORDS | nested)


_leaf_schema = Record({"type": one(*TYPES)}, KEYWORDS, most=2)
_NESTED = {depth: _nested(depth) for depth in (1, 2, 3)}
_object_schema = Record(
    {"type": one("object"), "properties": mapping(["a", "path", "b"], lambda tape: schema(tape, 2))}
)
object_schema = field(_object_schema, _object_schema, _object_schema, schema)
ARGUMENTS = [
    '{"a": 1}', "{}", "", "[]", "null", "{", '{"a": NaN}', DEEP_TEXT, "9" * 5_000, '{"a": 1e999}', '"x"',
    '{"a":"\\ud83d"}',
]  # fmt: skip
arguments = field(lambda tape: tape.pick(ARGUMENTS), mapping(["a", "path"], leaf, 2))
tool_input = mapping(["a", "path"], anything, 2)

# --- what the dialects share ---

VARIABLES = [
    "enable_thinking", "messages", "tools", "add_generation_prompt", "bos_token", "a", "clock", "tokenize",
    "pinned_dates", "chat_template", "strftime_now", "documents", "continue_final_message", "conversation",
    "return_dict", "return_tensors",
]  # fmt: skip
stream_options = Record({}, read(StreamOptions) | {"include_usage": flag})
sampling: Fields = {
    "temperature": unit, "top_p": unit, "top_k": count, "min_p": unit, "repetition_penalty": unit, "seed": number,
    "repetition_context_size": count, "presence_penalty": unit, "frequency_penalty": unit,
    "logit_bias": mapping(["0", "1", "-1", "9" * 5_000, "a", "²", ""], field(one(1, -100, 0.5, 101), number), 2),
    "max_tokens": count, "stream": flag, "user": text, "session_id": text, "prompt_cache_key": text, "thread_id": text,
    "stop": field(text, some(text)), "n": one(1, 2, 3),
    "metadata": Record({}, {"session_id": text, "user_id": text, "thinking": anything, "a": anything}),
    "extra_body": Record({}, {"chat_template_kwargs": anything, "session_id": text, "reasoning": anything}),
    "chat_template_kwargs": mapping(VARIABLES, anything, 2),
    "thinking": one({"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, True, "high", {"type": ["a"]}),
    "reasoning_effort": one("low", "high", "none"), "enable_thinking": flag, "unknown": anything, "drafts": flag,
    "conversation_id": text, "chat_id": text, "safety_identifier": text,
    "reasoning": one({"effort": "low", "summary": "auto"}, {"enabled": False}, "high", {"generate_summary": True}),
    "stream_options": stream_options, "repetition_guard": flag,
}  # fmt: skip
response_format = field(
    lambda tape: {"type": "text"},
    lambda tape: {"type": "json_object"},
    lambda tape: {"type": "json_schema", "json_schema": {"schema": schema(tape), "name": text(tape)}},
    lambda tape: {"type": "json_schema", "schema": object_schema(tape)},
)

# --- images: a text model reads a line in the place of each ---

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    )
).decode()
ADDRESSES = [
    f"data:image/png;base64,{PIXEL}", "data:image/png;base64,", "data:image/png;base64,AAAA", "data:,x", "x", "",
    f"data:image/png;base64,{PIXEL[:40]}", "data:image/svg+xml;base64,PHN2Zz4=", "http://127.0.0.1:1/x.png", "file:///x",
    "https://[::1", "http://", "data:image/png;base64,\ud83d", "data:text/html;base64," + "A" * 3_000,
]  # fmt: skip
IMAGES = ["image_url", "input_image", "image"]
address = one(*ADDRESSES)
source = Record(
    {"type": one("base64", "url", "file", "text", "content"), "data": one(PIXEL, "AAAA", "", "x", "=")},
    {"media_type": one("image/png", "x"), "url": address, "file_id": text, "content": some(leaf)},
)
image = Record(
    {"type": one(*IMAGES), "image_url": field(address, Record({"url": address}))},
    {"source": source, "data": one(PIXEL, "x"), "image": address, "file_id": text, "filename": text, "detail": text},
)

# --- chat completions ---

PARTS = ["text", "input_text", "output_text", "refusal", "thinking", "reasoning", "audio", "file"]
part = Record({"type": one(*PARTS), "text": text}, {"thinking": text, "refusal": text})
content = field(plain, text, some(part), some(field(part, part, part, image)))
call = Record(
    {"function": Record({"name": name, "arguments": arguments})},
    {"id": text, "type": one("function"), "custom": field(anything, Record({"name": name, "input": text}))},
    most=1,
)
message = Record(
    {"role": one("user", "assistant", "system", "tool", "developer", "function"), "content": content},
    read(ChatMessage)
    | {
        "tool_calls": some(call, 2), "tool_call_id": text, "name": text, "reasoning_content": text,
        "reasoning": anything, "thinking_blocks": field(anything, some(Record({"thinking": text}))), "refusal": text,
        "audio": field(anything, Record({"id": text, "transcript": text})), "function_call": anything,
    },
    most=2,
)  # fmt: skip
function = Record({"name": name, "parameters": object_schema}, {"description": text, "strict": flag})
tool = field(Record({"type": one("function"), "function": function}), Record({"type": one("function"), "name": name}))
chosen = one(
    "auto", "none", "required", "any", {"type": "function", "function": {"name": "f"}}, {"type": ["function"]},
    {"type": {}},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, {"type": "auto"},
    {"type": "allowed_tools", "tools": [5]}, {"type": "allowed_tools", "allowed_tools": {"mode": {}, "tools": []}},
)  # fmt: skip
chat = Record(
    {"model": asked, "messages": some(message, 4, 1)},
    read(ChatBody, CHAT_FIELDS, SESSION_FIELDS, USER_FIELDS, THINKING)
    | sampling
    | {
        "tools": some(tool, 2, 1), "tool_choice": chosen, "functions": some(function, 2), "function_call": chosen,
        "response_format": response_format, "max_completion_tokens": count, "best_of": count, "modalities": anything,
        "parallel_tool_calls": flag, "logprobs": flag, "top_logprobs": one(1, 20),
    },
    most=4,
)  # fmt: skip

# --- Ollama ---

options = Record(
    {},
    {
        "temperature": unit, "top_p": unit, "top_k": count, "min_p": unit, "repeat_penalty": unit, "seed": number,
        "repeat_last_n": one(-1, 0, 64, 10**9), "num_predict": one(-2, -1, 0, 5, 2**60),
        "stop": field(some(text), text),
        "presence_penalty": unit, "frequency_penalty": unit, "num_ctx": count, "mirostat": anything,
    },
)  # fmt: skip
ollama_call = Record({"function": Record({"name": name, "arguments": tool_input})}, {"id": text})
ollama_images = some(one("aGk=", "", "data:image/png;base64,aGk=", "x" * 50), 2)
ollama_message = Record(
    {"role": one("user", "assistant", "system", "tool"), "content": text},
    {"thinking": text, "images": ollama_images, "tool_calls": some(ollama_call, 2), "tool_name": name,
     "tool_call_id": text},
)  # fmt: skip
ollama: Fields = {
    "stream": flag, "options": options, "format": field(one("", "json", "xml"), object_schema),
    "think": one(True, False, "low", "high", "so"), "keep_alive": one(0, -1, "5m", "0", 1.5),
}  # fmt: skip
ollama_chat = Record({"model": asked, "messages": some(ollama_message, 4, 1)}, ollama | {"tools": some(tool, 2, 1)})
ollama_generate = Record(
    {"model": asked, "prompt": field(plain, text)},
    ollama | {"system": text, "raw": flag, "images": ollama_images, "suffix": text, "context": some(one(1, 2))},
)
ollama_show = Record({"model": asked}, {"name": asked, "verbose": flag})

# --- completions ---

completions = Record(
    {"model": asked, "prompt": field(plain, text, some(one(1, 2, 300), 4, 1), some(text, 3, 1))},
    read(CompletionBody, SESSION_FIELDS)
    | sampling
    | {"echo": flag, "suffix": text, "best_of": number, "logprobs": one(1, 5)},
)

# --- Anthropic messages ---

SOURCES = [{"type": "text", "data": "x"}, {"type": ["text"]}, {"type": {}}, {"type": "content", "content": [5]}]
CHOICES = [
    {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}, {"type": ["any"]}, {"type": {}},
    {"type": "auto", "disable_parallel_tool_use": True}, {"type": "any", "disable_parallel_tool_use": 5},
]  # fmt: skip
BLOCKS = [
    "text", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "search_result", "image",
    "tool_reference", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "web_search_tool_result", "compaction",
    "tool_addition", "browser_state", "fallback",
]  # fmt: skip
block = Record(
    {"type": one(*BLOCKS), "text": text, "id": text, "name": name, "input": tool_input, "tool_use_id": text,
    "thinking": text},
    {
        "source": field(one(*SOURCES), source), "context": text,
        "content": content, "is_error": flag, "title": text, "signature": text, "cache_control": anything, "data": text,
        "tool_name": text, "server_name": text, "tool": field(anything, Record({"tool_name": text})), "tabs": anything,
    },
)  # fmt: skip
anthropic_content = field(plain, text, some(block))
anthropic_tool = Record(
    {"name": name, "input_schema": object_schema},
    {
        "type": one("custom", "web_search_20250305", "tool_search_tool_x", "tool_search_tool_regex"),
        "description": text, "strict": flag, "defer_loading": flag,
    },
    most=2,
)  # fmt: skip
said_message = Record({"role": one("user", "assistant", "system"), "content": anthropic_content}, read(MessageIn))
output_config = Record({}, read(OutputConfig) | {"effort": one("low", "max", "x"), "format": response_format})
amount = field(Record({"type": one("tool_uses", "input_tokens", "thinking_turns", "all"), "value": number}), one("all"))
edit = Record(
    {"type": one("clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112", "clear_all")},
    {
        "trigger": amount, "keep": amount, "clear_at_least": amount, "exclude_tools": some(name),
        "clear_tool_inputs": flag,
    },
)  # fmt: skip
messages = Record(
    {"model": asked, "max_tokens": count, "messages": some(said_message, 4, 1)},
    read(MessagesBody, MESSAGES_FIELDS, THINKING)
    | sampling
    | {
        "system": anthropic_content, "tools": some(anthropic_tool, 2, 1), "stop_sequences": field(some(text), anything),
        "tool_choice": one(*CHOICES), "output_config": output_config, "output_format": response_format,
        "context_management": Record({"edits": some(edit, 2)}),
    },
    most=4,
)  # fmt: skip

# --- Responses ---

ITEMS = [*KNOWN.split(", "), *INSTEAD, "unknown_call"]
FORMATS = [
    {"type": "text"}, {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}, {"type": "grammar"}, "text",
    {"type": "grammar", "syntax": 5, "definition": []},
]  # fmt: skip
ELSEWHERE = [
    "web_search", "web_search_preview", "file_search", "code_interpreter", "computer", "computer_use_preview",
    "image_generation", "local_shell", "shell", "mcp", "apply_patch", "programmatic_tool_calling",
]  # fmt: skip
SEALS = [seal("thoughts"), seal(""), seal("x" * 3_000), seal("thoughts")[:-3], "start_llm.2.", "start_llm.2.!", "gAAA"]
sealed = field(one(*SEALS), text)
responses_tool = field(
    tool,
    Record(
        {"type": one("function"), "name": name, "parameters": object_schema},
        {"strict": flag, "description": text, "defer_loading": flag},
    ),
    Record(
        {"type": one("tool_search")},
        {"execution": one("server", "client", "x"), "description": text, "parameters": object_schema},
    ),
    Record({"type": one("custom"), "name": name}, {"format": field(one(*FORMATS), anything), "description": text}),
    Record({"type": one("namespace"), "name": name, "tools": some(tool, 2)}, {"description": text}),
    Record({"type": one(*ELSEWHERE, "tool_search")}, {"server_label": text, "name": name}),
)
TOOL_TYPES = ["function", "custom", "namespace", "mcp"]
reference = Record({"type": one(*TOOL_TYPES), "name": name}, {"namespace": name})
responses_chosen = field(
    chosen,
    reference,
    Record({"type": one("allowed_tools"), "tools": some(reference)}, {"mode": one("auto", "required", "x")}),
)
responses_content = field(
    content, some(field(part, Record({"type": one("encrypted_content"), "encrypted_content": sealed})))
)
thoughts = field(anything, some(Record({"type": one("summary_text", "reasoning_text"), "text": text})))
item = Record(
    {
        "type": one(*ITEMS), "role": one("user", "assistant", "developer", "system"), "content": responses_content,
        "call_id": text, "name": name, "arguments": arguments, "input": text, "output": content,
    },
    {
        "id": text, "summary": thoughts, "encrypted_content": sealed, "namespace": text, "action": anything,
        "status": text, "result": text, "results": anything, "queries": anything, "code": text, "operation": anything,
        "server_label": text, "error": anything, "tools": some(responses_tool, 2),
    },
)  # fmt: skip
responses = Record(
    {"model": asked, "input": field(plain, text, some(item, 4, 1))},
    read(ResponsesBody, REFUSED, SESSION_FIELDS)
    | sampling
    | {
        "instructions": text, "tools": some(responses_tool, 2, 1), "tool_choice": responses_chosen, "store": flag,
        "previous_response_id": field(one(LAST), text), "text": field(lambda tape: {"format": response_format(tape)}),
        "include": one(["reasoning.encrypted_content"], ["message.output_text.logprobs"], [5], [[]]),
        "truncation": one("auto", "disabled"), "max_output_tokens": count, "max_tool_calls": number,
        "top_logprobs": one(1, 9), "parallel_tool_calls": flag, "background": flag, "conversation": anything,
        "prompt": anything, "service_tier": text,
    },
    most=4,
)  # fmt: skip

# --- texts to vectors ---

encoder = one("embedding", "text-embedding-3-small", "default", "tiny-encoder", "gpt-5", "")
ids = some(one(1, 2, 300, 0, -1, 2**31, 10**60, True), 4, 1)
embeddings = Record(
    {"input": field(plain, text, some(text, 4, 1), ids, some(ids, 2, 1), some(field(text, ids), 3, 1))},
    read(EmbeddingsBody)
    | {
        "model": encoder, "encoding_format": one("float", "base64", "hex"), "dimensions": field(one(1, 8, 32), number),
        "truncate": flag, "user": text,
    },
)  # fmt: skip

# --- speech ---

speech = Record(
    {"input": field(plain, text)},
    read(SpeechBody)
    | {
        "model": field(asked, one("tts-1", "kokoro")), "voice": field(one("alloy", {"id": "x"}), anything),
        "response_format": one("mp3", "wav", "aac"), "speed": field(one(1.0, 0.25, 5), number),
        "stream_format": one("audio", "sse"), "user": text,
    },
)  # fmt: skip
SOUNDS = ["", "x", "RIFF", "RIFF\x24\x00\x00\x00WAVEfmt ", "ID3\x03\x00", "fLaC", "OggS", "a\r\n--b\r\n"]
transcription = Record(
    {"file": field(one(*SOUNDS), text)},
    read(TranscriptionBody)
    | {
        "model": field(asked, one("whisper-1")), "language": one("en", "xx", ""), "prompt": text, "user": text,
        "response_format": one("json", "text", "verbose_json", "srt", "x"), "temperature": one("0", "1", "nan", "x"),
        "stream": one("true", "false"), "timestamp_granularities[]": one("segment", "word"),
    },
    most=4,
)  # fmt: skip
"""The parts of a form."""

# --- which models are loaded ---

model = one(
    "default", "oracle-two", "gpt-5", "claude-x", "nobody", "", "../x", "/etc/passwd", "x" * 600, "openai/default"
)
administration = Record({"model": model}, {"pinned": flag, "unknown": anything})
fetched = Record({"name": field(one("owner/name", "qwen3-4b", "../x", "/etc", "a/b/c", " "), text)})
