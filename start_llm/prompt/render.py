"""Messages to text: fits a conversation to what the template can show, then renders it once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, Tool
from start_llm.core.reasoning_tags import REASONING_TAGS
from start_llm.prompt.interleave import interleaved
from start_llm.prompt.ports import Template, TemplateError
from start_llm.prompt.probe import Traits

Dicts = list[dict[str, Any]]

_TOOLS_INTRO = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "The functions, each as a JSON object within <tools></tools> tags:\n<tools>\n"
)
_TOOLS_OUTRO = (
    "\n</tools>\n\nTo call a function, write a JSON object with its name and arguments within "
    '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}'
    "\n</tool_call>"
)


# Arguments of `apply_chat_template` itself.
_RESERVED = frozenset(
    [
        "self",
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text.

    Attributes:
        generation: character offset at which the generation prompt begins.
        head: character offset at which the first message after tools and system may begin at the latest, 0 for none.
    """

    text: str
    generation: int
    head: int

    @property
    def in_reasoning(self) -> bool:
        """The generation prompt has opened a reasoning block and not closed it."""
        tail = self.text[self.generation :]
        return any(tail.rfind(opened) > tail.rfind(closed) for opened, closed in REASONING_TAGS)


@lru_cache(maxsize=4096)
def _parsed(arguments: str) -> Any:
    """The arguments as an object, or None where they are not one."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def common_prefix(a: str, b: str, chunk: int = 65536) -> int:
    """Length of the longest common prefix, in characters."""
    limit = min(len(a), len(b))
    low = 0
    while low < limit and a[low : low + chunk] == b[low : low + chunk]:
        low += chunk
    low, high = min(low, limit), min(low + chunk, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Renderer:
    """Renders with one template. Thread-safe."""

    def __init__(self, template: Template, traits: Traits, *, preserve_thinking: bool) -> None:
        self._template = template
        self.traits = traits
        self._preserve = preserve_thinking
        self._suffixes: dict[str, str] = {}
        self._heads: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def variables(self, *, thinking: bool, effort: str | None, extra: dict[str, Any]) -> dict[str, Any]:
        """Template variables of a request; the client's own win.

        Raises:
            BadRequest: the client names something that is no variable of a template.
        """
        if reserved := sorted(_RESERVED & extra.keys()):
            raise BadRequest(
                f"chat_template_kwargs.{reserved[0]} is not allowed: it is not a variable of the template",
                param="chat_template_kwargs",
            )
        chosen: dict[str, Any] = dict.fromkeys(self.traits.switches, thinking)
        if self.traits.preserve:
            chosen["preserve_thinking"] = self._preserve
        if effort is not None:
            chosen["reasoning_effort"] = effort
        chosen.update(extra)
        return chosen

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]) -> Rendered:
        """Text with the generation prompt.

        Raises:
            BadRequest: the template refuses the conversation.
        """
        dicts, functions = self.fit(messages, tools)
        text = self._text(dicts, functions, True, variables)
        suffix = self._suffix(variables)
        if suffix and text.endswith(suffix):
            generation = len(text) - len(suffix)
        else:
            generation = common_prefix(text, self._text(dicts, functions, False, variables))
        return Rendered(text, generation, self._head(text, messages, tools, variables))

    def _text(self, dicts: Dicts, functions: Dicts | None, agp: bool, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(dicts, functions, agp, **variables)
        except TemplateError as error:
            raise BadRequest(f"The model's chat template refuses these messages: {error}", param="messages") from error

    def _suffix(self, variables: dict[str, Any]) -> str:
        """The generation prompt as it usually looks with these variables."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        known = self._suffixes.get(key)
        if known is not None:
            return known
        user: Dicts = [{"role": "user", "content": "x"}]
        try:
            opened = self._template.render(user, None, True, **variables)
            closed = self._template.render(user, None, False, **variables)
        except TemplateError:
            return ""
        suffix = opened[len(closed) :] if opened.startswith(closed) else ""
        with self._lock:
            if len(self._suffixes) > 256:
                self._suffixes.clear()
            self._suffixes[key] = suffix
        return suffix

    def _head(self, text: str, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]) -> int:
        """How far a conversation with the same tools and system text, but another user message, has the same text."""
        lead = _leading_systems(messages)
        if not lead and not tools:
            return 0
        key = _head_key(messages[:lead], tools, variables)
        known = self._heads.get(key)
        if known is not None and known <= len(text):
            return known
        probe = (*messages[:lead], Message("user", "\N{SECTION SIGN}"))
        try:
            dicts, functions = self.fit(probe, tools)
            other = self._template.render(dicts, functions, False, **variables)
        except TemplateError:
            return 0
        head = common_prefix(text, other)
        with self._lock:
            if len(self._heads) > 256:
                self._heads.clear()
            self._heads[key] = head
        return head

    # --- fitting ------------------------------------------------------------

    def fit(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Dicts, Dicts | None]:
        """The conversation as OpenAI-style dictionaries that this template can show, and its tools."""
        traits = self.traits
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        dicts: Dicts = []
        lead = _leading_systems(messages)
        if lead and not traits.systems:
            joined = "\n\n".join(message.content for message in messages[:lead])
            messages = (Message("system", joined), *messages[lead:])
            lead = 1
        for index, message in enumerate(messages if traits.many_calls else interleaved(messages)):
            if message.role == "system" and index >= lead and not traits.mid_system:
                dicts.append({"role": "user", "content": f"<system-message>\n{message.content}\n</system-message>"})
            else:
                dicts.append(self._dict(message, names))
        functions: Dicts | None = [tool.as_function() for tool in tools] or None
        if functions is not None and not traits.tools:
            text = _TOOLS_INTRO + "\n".join(json.dumps(f, ensure_ascii=False) for f in functions) + _TOOLS_OUTRO
            _add_system(dicts, text)
            functions = None
        if not traits.system:
            _system_into_user(dicts)
        if not traits.repeats:
            dicts = _merged(dicts)
        first = next((d["role"] for d in dicts if d["role"] != "system"), None)
        if first == "assistant" and not traits.assistant_first:
            dicts.insert(
                next(i for i, d in enumerate(dicts) if d["role"] == "assistant"), {"role": "user", "content": ""}
            )
        return dicts, functions

    def _dict(self, message: Message, names: dict[str, str]) -> dict[str, Any]:
        if message.role == "assistant":
            return self._assistant(message)
        content = message.content
        if message.role != "tool":
            return {"role": message.role, "content": content}
        if message.is_error and not content.lstrip().lower().startswith(("error", "<tool_use_error>")):
            content = f"Error: {content}"
        if not self.traits.results:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        result = {"role": "tool", "content": content}
        if message.tool_call_id is not None or self.traits.short_ids:
            result["tool_call_id"] = self._call_id(message.tool_call_id or "")
        name = message.name or names.get(message.tool_call_id or "")
        if name:
            result["name"] = name
        return result

    def _call_id(self, call_id: str) -> str:
        if not self.traits.short_ids or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def _assistant(self, message: Message) -> dict[str, Any]:
        traits = self.traits
        content = message.content
        result: dict[str, Any] = {"role": "assistant"}
        if message.reasoning:
            if traits.reasoning_key is not None:
                result[traits.reasoning_key] = message.reasoning
                if message.tool_calls and content.strip() and not traits.reasoning_beside_text:
                    result[traits.reasoning_key] = f"{message.reasoning}\n\n{content}"
                    content = ""
            elif traits.reasoning_inline and self._preserve:
                # The template knows no reasoning but shows what the content says.
                content = f"<think>\n{message.reasoning.strip()}\n</think>\n\n{content.lstrip()}"
        if message.tool_calls and traits.calls is None:
            blocks = (
                f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments or "{}"}}}' for c in message.tool_calls
            )
            content = "\n".join([*([content] if content else []), *(f"<tool_call>\n{b}\n</tool_call>" for b in blocks)])
        elif message.tool_calls:
            result["tool_calls"] = [
                {
                    "type": "function",
                    "id": self._call_id(call.id),
                    "function": {"name": call.name, "arguments": self._arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        result["content"] = content
        return result

    def _arguments(self, arguments: str) -> Any:
        if self.traits.calls == "string":
            return arguments or "{}"
        value = _parsed(arguments)
        if value is not None:
            return value
        # A model or client wrote what is no JSON object; it is shown as it is.
        return arguments if self.traits.string_too else {"arguments": arguments}


def _leading_systems(messages: Sequence[Message]) -> int:
    return next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))


def _head_key(systems: Iterable[Message], tools: Sequence[Tool], variables: dict[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for part in (
        *(message.content for message in systems),
        json.dumps([tool.as_function() for tool in tools]),
        json.dumps(variables, sort_keys=True, default=repr),
    ):
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.digest()


def _add_system(dicts: Dicts, text: str) -> None:
    if dicts and dicts[0]["role"] == "system":
        dicts[0] = {"role": "system", "content": f"{dicts[0]['content']}\n\n{text}"}
    else:
        dicts.insert(0, {"role": "system", "content": text})


def _system_into_user(dicts: Dicts) -> None:
    """Puts a leading system text in front of the first user message."""
    texts = []
    while dicts and dicts[0]["role"] == "system":
        texts.append(dicts.pop(0)["content"])
    if not texts:
        return
    if dicts and dicts[0]["role"] == "user":
        dicts[0] = {"role": "user", "content": "\n\n".join([*texts, dicts[0]["content"]])}
    else:
        dicts.insert(0, {"role": "user", "content": "\n\n".join(texts)})


def _merged(dicts: Dicts) -> Dicts:
    """Joins neighbours of one role (user, or assistant without calls), for templates that want strict turns."""
    result: Dicts = []
    for item in dicts:
        last = result[-1] if result else None
        if last is not None and last["role"] == item["role"] and item["role"] in ("user", "assistant"):
            texts = [text for text in (last["content"], item["content"]) if text]
            calls = [*last.get("tool_calls", ()), *item.get("tool_calls", ())]
            result[-1] = {**last, **item, "content": "\n\n".join(texts), **({"tool_calls": calls} if calls else {})}
        else:
            result.append(item)
    return result
