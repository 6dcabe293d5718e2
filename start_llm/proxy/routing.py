"""Which node gets a request. The whole decision, and the memory that it needs; no I/O, no clock, no LiteLLM.

A request goes, in this order,

1. to the node of its conversation (`NodePicker.home`), known by the client's name of the conversation, or by its system
   text and first user message. It stays there as long as that node is offered and not swamped.
2. a new conversation, or one whose node is gone: to the nodes that have the longest beginning of its prompt stored
   (`NodePicker.choose`). Nodes that lack at most `NEAR` of the prompt against the best one count as equal. For a
   conversation that goes on only the best one counts: this proxy sent it there before it was started again.
3. of those to the least loaded one: requests, then prompt tokens that it still has to compute, then conversations that
   live there. What is left is decided by a hash.

A beginning that a node is computing is stored nowhere yet. So the node that was given the same tools and system text
last counts as one that has them. A wrong decision costs computing, never an answer. It does not know which nodes
answer: it is offered those that do.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from start_llm.core.errors import StartLLMError
from start_llm.core.jsontext import parse_object
from start_llm.core.protocol import session_of
from start_llm.files.lru import Lru

NEAR = 0.1
"""Of the prompt: a node that has so much less stored than the best one is as good."""
CROWDED = 4
"""A node with so many more requests than the idlest one, and more than twice as many, gets no new conversation."""
SWAMPED = 4
"""A node at which so many requests wait gives conversations away, if at another one nobody waits."""
MOST_CONVERSATIONS = 8192
_OF_A_MODEL = ("reasoning", "function_call", "custom_tool_call")  # items of Responses that have no role
# Of a system text: clocks, counts, and Claude Code's line that is another one in each conversation (`clients/claude`).
_CHANGES = re.compile(r"^x-anthropic-billing-header:.*|\d+", re.MULTILINE)
_MODEL_FIELD = re.compile(rb'name="model"\r\n(?:[^\r\n]{1,256}\r\n){0,8}\r\n([^\r\n]{1,256})\r\n')


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What of a request decides where it goes. Digests are hex."""

    model: str  # as the client names it
    # of the conversation, the surest first: system text, first user message and the client's name; the name alone
    conversation: tuple[str, ...]
    opening: str  # of tools and system text; empty: it has neither
    opening_share: float = 0.0  # of the request's text, 0.0 to 1.0
    goes_on: bool = False  # a part of it is a model's: it is not the first request of its conversation


@dataclass(frozen=True, slots=True)
class Load:
    """What a node has to do."""

    running: int = 0
    waiting: int = 0
    prefill: int = 0  # prompt tokens that are still to be computed, as far as they are known

    @property
    def requests(self) -> int:
        return self.running + self.waiting


class NodePicker:
    """Decides, and remembers what was decided. Nodes are known by their names. For one thread."""

    def __init__(self) -> None:
        self._homes: Lru[str, str] = Lru(MOST_CONVERSATIONS)
        self._openings: Lru[str, str] = Lru(MOST_CONVERSATIONS)

    def home(self, key: RouteKey, loads: Mapping[str, Load]) -> str | None:
        """The node of the conversation, if it is one of `loads` and not swamped."""
        for name in key.conversation:
            node = self._homes.get(name)
            if node is not None and node in loads:
                is_swamped = loads[node].waiting >= SWAMPED and any(load.waiting == 0 for load in loads.values())
                return None if is_swamped else node
        return None

    def choose(
        self,
        key: RouteKey,
        loads: Mapping[str, Load],
        stored: Mapping[str, int],
        prompt: int,
    ) -> str:
        """The node for a request that has no home.

        Args:
            loads: the nodes that may be asked, at least one.
            stored: tokens of the prompt that a node has stored, as far as that is known.
            prompt: tokens of the prompt; 0: nobody knows.
        """
        known = {node: stored.get(node, 0) for node in loads}
        sent = self._openings.get(key.opening) if key.opening else None
        if sent in known:
            known[sent] = max(known[sent], int(key.opening_share * (prompt or 1000)))
        least = min(load.requests for load in loads.values())
        crowded = max(least + CROWDED, 2 * least)
        free = [node for node, load in loads.items() if load.requests <= crowded]
        most = max(known[node] for node in free)
        margin = 0 if key.goes_on else NEAR * (prompt or 1000)
        near = [node for node in free if known[node] >= most - margin]
        living = Counter(self._homes.values())

        def order(node: str) -> tuple[int, int, int, str]:
            return loads[node].requests, loads[node].prefill, living[node], digest(key.opening, node)

        return min(near, key=order)

    def remember(self, key: RouteKey, node: str, offered: Iterable[str]) -> None:
        """`node` got the request. The surest name goes with it. A second one, the client's own, keeps its node as long
        as that is one of `offered` (those in doubt included): sub-agents with the same name may go elsewhere."""
        for place, name in enumerate(key.conversation):
            if place == 0 or self._homes.get(name) not in set(offered):
                self._homes.put(name, node)
        if key.opening:
            self._openings.put(key.opening, node)


# --- what of a request decides --------------------------------------------------------------------


def fields_of(body: bytes, *, is_json: bool) -> dict[str, Any]:
    """The fields of a body, of a form only the model that it names. Empty where the body is neither."""
    if is_json:
        try:
            return parse_object(body)
        except StartLLMError:
            return {}
    # Only one place is tried: a file of 64 MB may hold as many of them as it likes.
    begin = body.find(b'name="model"\r\n')
    found = _MODEL_FIELD.match(body, begin) if begin >= 0 else None
    return {"model": found[1].decode("utf-8", "replace")} if found else {}


def route_key(body: Mapping[str, Any], headers: Mapping[str, str]) -> RouteKey:
    """The key by which a request finds the node that has its KV. Any body will do, a wrong request, too: nothing is
    raised. `headers`: names in lower case."""
    system, user, length, goes_on = _beginning(body)
    tools = _text(body.get("tools"))
    opening = digest(tools, _CHANGES.sub("", system)) if tools or system else ""
    name, model = session_of(body, headers)[0], str(body.get("model", ""))
    exact = digest(model, name, opening, user) if system or user else ""
    named = digest(model, name) if name else ""
    share = (len(tools) + len(system)) / max(1, len(tools) + length)
    return RouteKey(model, tuple(each for each in (exact, named) if each), opening, min(1.0, share), goes_on)


def _beginning(body: Mapping[str, Any]) -> tuple[str, str, int, bool]:
    """(system text, first user message, characters of all messages, whether one of them is a model's)."""
    given = body.get("messages", body.get("input", body.get("prompt")))
    messages: Sequence[Any] = given if isinstance(given, list) else [] if given is None else [{"content": given}]
    system = [_text(body.get("system")), _text(body.get("instructions"))]
    user, length, goes_on = "", 0, False
    for message in messages:
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        text = _text(message.get("content", message) if isinstance(message, dict) else message)
        length += len(text)
        goes_on = goes_on or role == "assistant" or (isinstance(message, dict) and message.get("type") in _OF_A_MODEL)
        if role in ("system", "developer") and not user:  # a list that a client sends has no hash
            system.append(text)
        elif role == "user" and not user:
            user = text
    whole = "\n".join(text for text in system if text)
    return whole, user, length + len(system[0]) + len(system[1]), goes_on


def _text(value: Any) -> str:
    """A content of any form: the words of text parts, and all else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return json.dumps(value, sort_keys=True, default=str)


def digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "replace")).hexdigest()[:32]
