"""Side requests: what an agent asks beside its conversation (a title, a commit message), by the main model's name.

Taking one for a conversation's turn costs time; taking a turn for one costs the user the answer of the model that was
chosen. So all signs must be there, and each is something that the request itself says.
"""

from __future__ import annotations

from typing import Any

from start_llm.core.request import ChatRequest

MOST_TOKENS = 1024
"""Of the answer, where a client says by that number that it wants little."""
MOST_CHARACTERS = 8000
"""Of all messages. More is work for the main model, and a small one may have no room for it."""
LITTLE_EFFORT = frozenset({"minimal", "low"})


def is_side_request(request: ChatRequest) -> bool:
    """A short instruction without tools that no turn came before, and whose client says that it wants little.

    It may still have named tools that were passed over while it was read: see `names_tools`.
    """
    if request.dialect not in {"chat", "messages", "responses"} or request.tools or request.n > 1:
        return False
    little = request.max_tokens is not None and request.max_tokens <= MOST_TOKENS
    if not little and request.reasoning_effort not in LITTLE_EFFORT:
        return False
    roles = {message.role for message in request.messages}
    if roles != {"system", "user"} or any(message.attachments or message.images for message in request.messages):
        return False
    return sum(len(message.content) for message in request.messages) <= MOST_CHARACTERS


def names_tools(body: Any) -> bool:
    """Whether a request's body tells of tools, be they shown to the model or not."""
    if not isinstance(body, dict):
        return False
    items = body.get("input")
    inside = isinstance(items, list) and any(isinstance(item, dict) and item.get("tools") for item in items)
    return bool(body.get("tools") or body.get("functions") or inside)
