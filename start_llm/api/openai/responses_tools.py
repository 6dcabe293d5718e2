"""Tools of the Responses API as functions of flat names, and the way back from a flat name to the client's own.

A function `f` in the namespace `n` is ``n__f`` to the model. A custom (freeform) tool is a function of one string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from start_llm.api.common.fields import bad, items_of, name_in, optional_in, short, string_in, within, word
from start_llm.api.common.tools import choose, function_of, shown_tools, tool_of
from start_llm.core.errors import BadRequest
from start_llm.core.jsontext import too_much_to_read
from start_llm.core.limits import TOOLS
from start_llm.core.messages import Tool
from start_llm.core.request import ToolChoice, ToolSearch

SEPARATOR, SEARCH = "__", "tool_search"
RunBy = Literal["client", "server"]
PASSED_OVER = frozenset(
    {
        "web_search", "web_search_preview", "file_search", "code_interpreter", "computer", "computer_use_preview",
        "image_generation", "local_shell", "shell", "mcp", "apply_patch", "programmatic_tool_calling",
    }
)  # fmt: skip
_DATED = re.compile(r"_\d{4}_\d{2}_\d{2}$")  # web_search_2025_08_26
FREE_TEXT_NOTE = "Its input is free text: the argument `input` of the call, one string."
SERVED = frozenset({"function", "custom"})
FREE_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def flat_name(name: str, namespace: str | None) -> str:
    """The name under which the model sees the tool.

    It depends on `name` and `namespace` only, so a history reads the same whatever tools come with it.
    """
    if not namespace:
        return name
    return namespace + name if namespace.endswith(SEPARATOR) else f"{namespace}{SEPARATOR}{name}"


@dataclass(frozen=True, slots=True)
class Named:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    custom: bool = False
    search: RunBy | Literal[""] = ""  # who runs the ``tool_search``
    item: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # as it was sent

    def listed(self) -> dict[str, Any]:
        """As a search's output has it."""
        item = dict(self.item)
        return {"type": "namespace", "name": self.namespace, "tools": [item]} if self.namespace else item


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request by flat names, the choice, notes on those passed over, and how the client names them."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    notes: tuple[str, ...]
    named: Mapping[str, Named]
    search: ToolSearch | None = None

    def origin(self, called: str) -> Named:
        """The client's tool that a call means; models also call by the plain name, where only one tool has it."""
        return self.named.get(called) or self.named.get(_full(called, None, self.named)) or Named(called)


def toolbox(found: Sequence[tuple[str, Any]], choice: Any, brought: Sequence[tuple[str, Any]] = ()) -> Toolbox:
    """From (path, tool) pairs and the body's ``tool_choice``. Raises BadRequest, NotSupported.

    `brought`: by items of the conversation. Such a tool takes the place of one of its name, and is not deferred.
    """
    reader = _Reader()
    for reader.brings, pairs in ((False, found), (True, brought)):
        for path, tool in pairs:
            reader.read(tool, path)
            within(TOOLS, len(reader.tools), "tools")
    picked, tools = choose(_flat_choice(choice, reader.named), tuple(reader.tools.values()))
    return reader.box(reader.introduced(tools), picked)


class _Reader:
    def __init__(self) -> None:
        self.brings = False
        self.tools: dict[str, Tool] = {}
        self.deferred: set[str] = set()
        self.found: set[str] = set()
        self.named: dict[str, Named] = {}
        self.notes: list[str] = []
        self._about: dict[str, list[str]] = {}

    def read(self, tool: Any, path: str) -> None:
        kind = _kind(tool)
        if kind == "namespace":
            self._namespace(tool, path)
        elif kind == SEARCH and SEARCH not in self.named:
            run_by: RunBy = "client" if tool.get("execution") == "client" else "server"
            about = {name: tool.get(name) for name in ("description", "parameters")} if run_by == "client" else {}
            self.tools[SEARCH] = function_of({"name": SEARCH} | about, path)
            self.named[SEARCH] = Named(SEARCH, search=run_by)
        elif _DATED.sub("", kind) in PASSED_OVER:
            self._pass_over(tool, path)
        else:
            self._add(tool, path, None)

    def _namespace(self, tool: dict[str, Any], path: str) -> None:
        name, about = name_in(tool, path), optional_in(tool, "description", str, path)
        known = self._about.setdefault(name, [])
        if about and about.strip() and about not in known:
            known.append(about)
        for place, part in items_of(tool.get("tools"), f"{path}.tools", "a list of tools"):
            if _kind(part) in SERVED:
                self._add(part, place, name)
            else:
                self._pass_over(part, place)

    def _add(self, item: Any, path: str, namespace: str | None) -> None:
        custom = _kind(item) == "custom"
        tool = _custom(item, path) if custom else tool_of(item, path)
        flat = flat_name(tool.name, namespace)
        if flat in self.named and not self.brings:
            raise BadRequest(f"{path}: a second tool is named {short(flat)}.", param=path)
        self.tools[flat] = replace(tool, name=flat)
        self.named[flat] = Named(tool.name, namespace, custom, item=item)
        if self.brings:
            self.found.add(flat)
        elif optional_in(item, "defer_loading", bool, path):
            self.deferred.add(flat)

    def _pass_over(self, tool: dict[str, Any], path: str) -> None:
        kind = tool.get("type")
        name = word(tool.get("name")) or word(tool.get("server_label")) or kind
        self.notes.append(f"{path} ({str(name)[:64]}, type {kind})")

    def box(self, tools: tuple[Tool, ...], choice: ToolChoice) -> Toolbox:
        """Of the tools that the choice leaves. Without a search nothing is hidden: it could not be found."""
        run_by = self.named[SEARCH].search if any(tool.name == SEARCH for tool in tools) else ""
        searches: dict[str, Literal["query", "pattern"]] = {SEARCH: "query"} if run_by == "server" else {}
        deferred = self.deferred if run_by else set[str]()
        shown, search = shown_tools(tools, searches, deferred, self.found | {choice.name or ""})
        return Toolbox(shown, choice, tuple(self.notes), self.named, search)

    def introduced(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools, the first of each namespace with what its namespace says of all of them."""
        about = {name: texts for name, texts in self._about.items() if texts}
        result = []
        for tool in tools:
            namespace = self.named[tool.name].namespace
            if namespace and namespace in about:
                prefix = flat_name("", namespace)
                texts = [f"About all tools named {prefix}*: {text}" for text in about.pop(namespace)]
                tool = replace(tool, description="\n\n".join([*texts, tool.description]).strip())
            result.append(tool)
        return tuple(result)


def _kind(item: Any) -> str:
    """A tool's type; what is no tool at all is left for `tool_of` to refuse."""
    kind = item.get("type", "function") if isinstance(item, dict) else "function"
    return kind if isinstance(kind, str) else "function"


def _custom(item: dict[str, Any], path: str) -> Tool:
    """A freeform tool. Its grammar is told, not enforced."""
    plain = tool_of({"name": item.get("name"), "description": item.get("description")}, path)
    # Clients say "do not wrap it in JSON" of tools that every local model can only call in its own format.
    said = [plain.description] if plain.description else []
    said.append(FREE_TEXT_NOTE)
    given = item.get("format")
    kind = given.get("type") if isinstance(given, dict) else given
    if isinstance(given, dict) and kind == "grammar":
        syntax, definition = (string_in(given, name, f"{path}.format") for name in ("syntax", "definition"))
        said.append(f"The input must match this {syntax} grammar:\n{definition}")
    elif kind not in (None, "text"):
        raise bad(f"{path}.format.type", "text or grammar", kind)
    return Tool(plain.name, "\n\n".join(said), FREE_TEXT)


# --- tool_choice ---


def _flat_choice(choice: Any, named: Mapping[str, Named]) -> Any:
    """``tool_choice`` with flat names; what is not understood is left for `choose` to refuse."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _flat_reference(choice, named)
    nested = choice.get("allowed_tools")
    place = nested if isinstance(nested, dict) else choice
    if not isinstance(place.get("tools"), list):
        return choice
    allowed: list[Any] = []
    for item in place["tools"]:
        kind = _kind(item)
        if kind == "namespace":
            inside = [flat for flat, tool in named.items() if tool.namespace == item.get("name")]
            allowed += [{"type": "function", "name": flat} for flat in inside]
        elif _DATED.sub("", kind) not in PASSED_OVER:
            allowed.append(_flat_reference(item, named))
    return {"type": "allowed_tools", "mode": place.get("mode", "auto"), "tools": allowed}


def _flat_reference(item: Any, named: Mapping[str, Named]) -> Any:
    if isinstance(item, dict) and _kind(item) == SEARCH:
        return {"type": "function", "name": SEARCH}
    if not isinstance(item, dict) or _kind(item) not in SERVED or not isinstance(item.get("name"), str):
        return item
    namespace = item.get("namespace")
    return {
        "type": "function",
        "name": _full(item["name"], namespace if isinstance(namespace, str) else None, named),
    }


def _full(name: str, namespace: str | None, named: Mapping[str, Named]) -> str:
    """The flat name; a name alone also means the one tool in a namespace that is called so."""
    flat = flat_name(name, namespace)
    if namespace or flat in named:
        return flat
    inside = [flat for flat, tool in named.items() if tool.name == name]
    return inside[0] if len(inside) == 1 else flat


# --- the free text of a custom tool's call, out of the JSON object that the model writes around it ---

HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters: an escape, or half of a surrogate pair, waits for its rest.
WHOLE = re.compile(
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)


class InputText:
    """Reads ``{"input": "..."}`` piece by piece; the pieces of text that come out make up what `finish` completes."""

    def __init__(self) -> None:
        self._pending = ""
        self._inside = False
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, piece: str) -> str:
        """The next text, as far as it is certain."""
        self._pending += piece
        if not self._inside:
            head = HEAD.match(self._pending)
            if head is None:
                return ""
            self._inside = True
            self._pending = self._pending[head.end() :]
        whole = WHOLE.match(self._pending)
        if whole is None:
            return ""
        self._pending = self._pending[whole.end() :]
        text: str = json.loads(f'"{whole[0]}"', strict=False)
        self._parts.append(text)
        return text

    def finish(self, arguments: str) -> str:
        """What `feed` still owed, given all of the arguments."""
        known, whole = self.text, _whole(arguments)
        missing = whole[len(known) :] if whole.startswith(known) else ""
        self._parts.append(missing)
        return missing


def _whole(arguments: str) -> str:
    try:
        if too_much_to_read(arguments):
            return arguments
        value: Any = json.loads(arguments, strict=False, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments
