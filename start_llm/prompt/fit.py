"""Fits a conversation to what a template can show: roles that it refuses, several calls, missing support for tools."""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from start_llm.core.jsontext import whole_characters
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.files.lru import Lru
from start_llm.prompt.guard import NOTHING, Guard
from start_llm.prompt.note import NOTE_CLOSE, NOTE_OPEN
from start_llm.prompt.reading import call_id, call_numbers, leading_systems
from start_llm.prompt.traits import Traits

Dicts = list[dict[str, Any]]
_KEPT_CHARS = 8_000_000

_TOOLS_INTRO = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "The functions, each as a JSON object within <tools></tools> tags:\n<tools>\n"
)
_TOOLS_OUTRO = (
    "\n</tools>\n\nTo call a function, write a JSON object with its name and arguments within "
    '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}'
    "\n</tool_call>"
)


class Fitter:
    """Makes OpenAI-style dictionaries for one template. Thread-safe."""

    def __init__(self, traits: Traits, *, preserve_thinking: bool, guard: Guard = NOTHING, names: bool = False) -> None:
        """`names`: the template shows who a user is; else that stands in front of the words."""
        self.traits = traits
        self._names = names
        self._preserve = preserve_thinking
        self._guard = guard
        # What the tree holds comes again in each turn: by `id`, a message or a tool, what was made of it, and its size.
        self._known: Lru[tuple[object, ...], tuple[object, dict[str, Any], int]]
        self._known = Lru(_KEPT_CHARS, lambda _, known: known[2])

    def fit(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Dicts, Dicts | None]:
        """The conversation as dictionaries that this template can show, and its tools."""
        lead = leading_systems(messages)
        if lead and not self.traits.systems:
            joined = "\n\n".join(self._named(message).content for message in messages[:lead])
            messages, lead = [Message("system", joined), *messages[lead:]], 1
        names = {call_id(call.id): call.name for message in messages for call in message.tool_calls}
        if not self.traits.many_calls:
            messages = interleaved(messages)
        dicts = [
            self._once(message, self._one, index >= lead, names.get(call_id(message.tool_call_id)))
            for index, message in enumerate(messages)
        ]
        functions: Dicts | None = [self._once(tool, self._guard.function) for tool in tools] or None
        if functions is not None and not self.traits.tools:
            _tools_into_system(dicts, functions)
            functions = None
        return self._in_allowed_order(dicts), functions

    def _once(self, one: Message | Tool, make: Callable[..., dict[str, Any]], *about: object) -> dict[str, Any]:
        """What `make` makes of this very object; nobody changes either."""
        key = id(one), *about
        known = self._known.get(key)
        if known is None:
            made = make(one, *about)
            known = one, made, 500 + (one.chars if isinstance(one, Message) else len(marshal.dumps(made)))
            self._known.put(key, known)
        return known[1]

    def _named(self, message: Message) -> Message:
        """A user's name stands in front of the words, behind a note, where the template does not show it."""
        if not message.name or self._names or message.role not in ("user", "system"):
            return message
        content = message.content
        noted = content.startswith(NOTE_OPEN) and NOTE_CLOSE in content
        at = content.index(NOTE_CLOSE) + len(NOTE_CLOSE) + 2 if noted else 0
        return replace(message, name=None, content=f"{content[:at]}{message.name}: {content[at:]}")

    def _in_allowed_order(self, dicts: Dicts) -> Dicts:
        """The same with roles only, and in an order only, that the template does not refuse. May change `dicts`."""
        if not self.traits.system:
            _system_into_user(dicts)
        if not self.traits.repeats:
            dicts = _merged(dicts)
        if not self.traits.assistant_first:
            _user_first(dicts)
        return dicts

    def _one(self, message: Message, behind_head: bool, called: str | None) -> dict[str, Any]:
        """`called`: of a result, the tool."""
        message = self._named(self._guard.message(message))
        if message.role == "assistant":
            return self._assistant(message)
        if message.role == "tool":
            return self._result(message, called)
        if message.role == "system" and behind_head and not self.traits.mid_system:
            return {"role": "user", "content": f"<system-message>\n{message.content}\n</system-message>"}
        named = {"name": message.name} if message.name else {}
        return {"role": message.role, "content": message.content, **named}

    def _result(self, message: Message, called: str | None) -> dict[str, Any]:
        content = message.content
        if message.is_error and not content.lstrip().lower().startswith(("error", "<tool_use_error>")):
            content = f"Error: {content}"
        if not self.traits.results:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        result = {"role": "tool", "content": content}
        if message.tool_call_id is not None or self.traits.short_ids:
            result["tool_call_id"] = self._call_id(message.tool_call_id or "")
        if name := message.name or self._guard.name(called or ""):
            result["name"] = name
        return result

    def _call_id(self, given: str) -> str:
        if not self.traits.short_ids or (len(given) == 9 and given.isalnum()):
            return self._guard.text(given)
        # Of what is left of the id on its way through a client: call and result must stay together.
        return hashlib.sha256(call_id(given).encode()).hexdigest()[:9]

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
            content = "\n".join([*([content] if content else []), *map(self._call_as_text, message.tool_calls)])
        elif message.tool_calls:
            result["tool_calls"] = [self._call(call) for call in message.tool_calls]
        result["content"] = content
        return result

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": self._guard.name(call.name), "arguments": self._arguments(call.arguments)}
        return {"type": "function", "id": self._call_id(call.id), "function": function}

    def _arguments(self, arguments: str) -> Any:
        if self.traits.calls == "string":
            return self._guard.text(arguments) or "{}"
        try:
            value = whole_characters(json.loads(arguments or "{}"))  # what they escape is text: no mark of an image
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return self._guard.value(value)
        # A model or client wrote what is no JSON object; it is shown as it is.
        arguments = self._guard.text(arguments)
        return arguments if self.traits.string_too else {"arguments": arguments}

    def _call_as_text(self, call: ToolCall) -> str:
        name, arguments = (self._guard.text(text) for text in (json.dumps(call.name), call.arguments or "{}"))
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _tools_into_system(dicts: Dicts, functions: Dicts) -> None:
    """The system text tells of them where the template has no place for tools."""
    text = _TOOLS_INTRO + "\n".join(json.dumps(function, ensure_ascii=False) for function in functions) + _TOOLS_OUTRO
    before = [dicts.pop(0)["content"]] if dicts and dicts[0]["role"] == "system" else []
    dicts.insert(0, {"role": "system", "content": "\n\n".join([*before, text])})


def _system_into_user(dicts: Dicts) -> None:
    """Puts a leading system text in front of the first user message."""
    texts = []
    while dicts and dicts[0]["role"] == "system":
        texts.append(dicts.pop(0)["content"])
    if texts:
        words = [dicts.pop(0)["content"]] if dicts and dicts[0]["role"] == "user" else []
        dicts.insert(0, {"role": "user", "content": "\n\n".join([*texts, *words])})


def _merged(dicts: Dicts) -> Dicts:
    """Joins neighbours of one role (user, or assistant without calls), for templates that want strict turns."""
    result: Dicts = []
    for item in dicts:
        last = result[-1] if result else {"role": ""}
        if last["role"] == item["role"] and item["role"] in ("user", "assistant"):
            texts = [text for text in (last["content"], item["content"]) if text]
            calls = [*last.get("tool_calls", ()), *item.get("tool_calls", ())]
            result[-1] = {**last, **item, "content": "\n\n".join(texts), **({"tool_calls": calls} if calls else {})}
        else:
            result.append(item)
    return result


def _user_first(dicts: Dicts) -> None:
    """Puts an empty user message in front of a conversation that begins with an assistant turn."""
    first = next((index for index, d in enumerate(dicts) if d["role"] != "system"), None)
    if first is not None and dicts[first]["role"] == "assistant":
        dicts.insert(first, {"role": "user", "content": ""})


# --- several calls of one turn: such templates name a result after the call right before it ---------------------------


def interleaved(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with one call in a message, each call followed by its own results: call a, result a, call b, ...

    Text and reasoning of a turn stay with its first call. A result belongs to the call of its turn that has its id; one
    without an id, to the first call that has no result yet. Results of no call of the turn come after all its calls.
    """
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        results = list(takewhile(lambda one: one.role == "tool", messages[index:]))
        found += _turn(message, results)
        index += len(results)
    return tuple(found)


def _turn(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """One assistant message with several calls, and the tool messages right behind it."""
    ids = call_numbers(message.tool_calls)
    answers: list[list[Message]] = [[] for _ in message.tool_calls]
    of_no_call: list[Message] = []
    for result in sorted(results, key=lambda one: one.tool_call_id is None):
        if result.tool_call_id is None:
            found = next((found for found in answers if not found), of_no_call)
        else:
            place = ids.get(call_id(result.tool_call_id))
            found = of_no_call if place is None else answers[place]
        found.append(result)
    for place, call in enumerate(message.tool_calls):
        yield replace(message, tool_calls=(call,)) if not place else Message("assistant", tool_calls=(call,))
        yield from answers[place]
    yield from of_no_call
