"""Every optional field and every member of a union that a vendor's library of today can send, once.

It is served, or refused by its name; what is refused stands in the table of docs/api.md.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Required, get_args, get_origin

import pytest
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from start_llm.api.openai.responses_items import conversation_of
from start_llm.core.errors import StartLLMError
from tests.api.fakes import read
from tests.lazy import Package

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
CHAT: Any = Package("openai.types.chat.completion_create_params")
RESPONSES: Any = Package("openai.types.responses.response_create_params")
MESSAGES: Any = Package("anthropic.types.beta.message_create_params")
DATA = "aGVsbG8="
_BY_NAME = {"data": DATA, "url": f"data:image/png;base64,{DATA}", "image_url": f"data:image/png;base64,{DATA}"}
_WORDS: dict[Any, Any] = {str: "x", int: 5, float: 0.5, bool: True, object: "x", Any: "x", type(None): None}


def bare(kind: Any) -> Any:
    """The type without what is written around it."""
    while get_origin(kind) in (typing.Annotated, Required, typing.NotRequired):
        kind = get_args(kind)[0]
    return kind


def least(kind: Any) -> Any:
    """The smallest value of a type."""
    return next(forms(kind, set()))


def _named(name: str, value: Any) -> Any:
    """Some words mean something by the field's name."""
    return _BY_NAME.get(name, value) if value == "x" else value


def bodies(kind: Any) -> Iterator[dict[str, Any]]:
    """The least body of a request, and one for each form of each field."""
    yield (start := least(kind))
    for name, (hint, _) in _fields(kind).items():
        for value in forms(hint, set()):
            yield start | {name: value}


def forms(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """The least value, and one for each form of each field inside."""
    kind = bare(kind)
    origin = get_origin(kind)
    if kind in _WORDS:
        yield _WORDS[kind]
    elif origin in (typing.IO, os.PathLike) or kind is os.PathLike:
        yield DATA  # what the library makes of a file
    elif origin is Literal:
        yield from get_args(kind)
    elif origin in (typing.Union, types.UnionType):
        for member in get_args(kind):
            yield from forms(member, seen)
    elif origin in (list, Iterable, Sequence, typing.Iterable):
        for value in forms(get_args(kind)[0], seen):
            yield [value]
    elif origin in (dict, Mapping):
        yield {}
    elif kind not in seen:
        seen.add(kind)
        start = {name: _named(name, least(hint)) for name, (hint, needed) in _fields(kind).items() if needed}
        yield start
        for name, (hint, _) in _fields(kind).items():
            for value in forms(hint, seen):
                yield start | {name: _named(name, value)}


def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Each field's type, and whether it has to be there."""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        # Where annotations are strings, `__required_keys__` does not know of ``Required``.
        return {n: (hint, n in kind.__required_keys__ or get_origin(hint) is Required) for n, hint in hints.items()}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: (field.annotation, field.is_required()) for name, field in kind.model_fields.items()}
    raise TypeError(f"no values are known of {kind!r}")


# The library's type of a body, and a tool that one with a choice of tools needs.
WALKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Chat": (lambda: CHAT.CompletionCreateParamsBase, {"type": "function", "function": {"name": "x"}}),
    "Responses": (lambda: RESPONSES.ResponseCreateParamsBase, {"type": "function", "name": "x"}),
    "Messages": (lambda: MESSAGES.MessageCreateParamsBase, {"name": "x", "input_schema": {}}),
}


def sent(api: str, body: dict[str, Any], tool: Any) -> Iterator[dict[str, Any]]:
    """The forms in which a body is sent. Anthropic's library has one type for the blocks of all roles."""
    body |= {"tools": [tool]} if "tool_choice" in body else {}
    yield body
    if api == "Messages":
        yield body | {"messages": [message | {"role": "assistant"} for message in body["messages"]]}


def refusals(api: str) -> dict[str, StartLLMError]:
    """By field, without numbers."""
    kind, tool = WALKS[api]
    found: dict[str, StartLLMError] = {}
    all_bodies = [*bodies(kind())]
    assert len(all_bodies) > 300
    for body in all_bodies:
        errors = []
        for variant in sent(api, body, tool):
            try:
                read(api.lower(), **variant)
            except StartLLMError as error:
                errors.append(error)
            else:
                break
        else:
            found[re.sub(r"\[\d+\]", "[]", errors[-1].param or "")] = errors[-1]
    return found


@pytest.mark.parametrize("api", WALKS)
def test_a_field_is_served_or_refused_by_its_name_as_the_docs_say(api: str) -> None:
    found = refusals(api)
    assert all(error.status in (400, 404, 501) for error in found.values())
    assert all(name and error.message.startswith(error.param or "?") for name, error in found.items()), found
    told = set(re.findall(rf"^\| {api} \| `([^`]+)` \| (\d+) \|", DOCS.read_text(), re.M))
    assert {(name, str(error.status)) for name, error in found.items()} == told


def test_what_ran_at_another_server_is_a_call_and_its_result() -> None:
    items = [
        {"type": "message", "role": "user", "content": "What is new?"},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "news"}},
        {"type": "mcp_call", "id": "m", "server_label": "git", "name": "log", "arguments": '{"n":1}', "output": "abc"},
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l", "output": "a.py"},
        {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a.py"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "failed", "output": "no such file"},
        {"type": "tool_search_call", "arguments": {"query": "weather"}},
        {"type": "tool_search_output", "tools": [{"type": "function", "name": "forecast"}]},
        {"type": "message", "role": "assistant", "content": "Nothing."},
    ]
    told, silent = conversation_of(items)
    assert silent == ("input[1] (compaction)",)
    calls = [(call.id, call.name, call.arguments) for message in told for call in message.tool_calls]
    assert calls == [
        ("w", "web_search", '{"type": "search", "query": "news"}'),
        ("m", "git__log", '{"n":1}'),
        ("l", "local_shell", '{"command": ["ls"]}'),
        ("p", "apply_patch", '{"type": "delete_file", "path": "a.py"}'),
        ("tool_search", "tool_search", '{"query": "weather"}'),
    ]
    results = [(message.tool_call_id, message.content) for message in told if message.role == "tool"]
    assert [call_id for call_id, _ in results] == [call[0] for call in calls]
    assert [text for _, text in results[1:]] == ["abc", "a.py", "failed\nno such file", "Tools now available: forecast"]
    assert told[-1].content == "Nothing."
    assert [tool.name for tool in read("responses", input=items).tools] == ["forecast"]


def test_blocks_of_the_vendor_s_server_are_calls_and_results_and_a_compaction_stands_for_what_was_before() -> None:
    search = [{"type": "web_search_result", "title": "News", "url": "u", "encrypted_content": "gAAAA"}]
    said = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "news"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": search},
        {"type": "text", "text": "It rains."},
    ]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    sent = read("messages", messages=talk).messages
    assert [message.role for message in sent] == ["user", "assistant", "tool", "assistant"]
    assert sent[1].tool_calls[0].name == "web_search" and sent[2].tool_call_id == "s"
    assert "News" in sent[2].content and "gAAAA" not in sent[2].content
    said.insert(2, {"type": "compaction", "content": "They spoke of the weather."})
    sent = read("messages", messages=talk).messages
    assert [(message.role, message.content) for message in sent] == [
        ("user", "They spoke of the weather."),
        ("assistant", "It rains."),
    ]
