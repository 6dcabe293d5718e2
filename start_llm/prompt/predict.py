"""Re-anchoring, the guess: what the history will look like when this client sends it back, or how it begins anew.

The guess applies what is known to happen: a transient message goes, and the template treats the turn as a past one. It
is made after every answer and checked against the client's next request; a client whose last guesses were wrong gets
none until one is right again.
"""

from __future__ import annotations

import threading

from start_llm.core.messages import Message
from start_llm.files.lru import Lru
from start_llm.prompt.prepared import Prepared

PATIENCE = 2
NEXT = "\N{SECTION SIGN}next\N{SECTION SIGN}"
_Client = tuple[str | None, str]  # two owners may have chosen the same session name


class Guesses:
    """Open guesses and how well they went, by session. Thread-safe."""

    def __init__(self, capacity: int = 512) -> None:
        self._open: Lru[_Client, tuple[bytes, int, tuple[int, ...]]] = Lru(capacity)
        self._misses: Lru[_Client, int] = Lru(capacity)
        self._heads: Lru[_Client, tuple[int, int]] = Lru(capacity)
        self._lock = threading.Lock()

    def made(self, prepared: Prepared, tokens: tuple[int, ...]) -> bool:
        """Notes the guess for what follows a request; True if this client's guesses are good enough to compute them."""
        client, keys = (prepared.request.owner, prepared.session), prepared.chain.keys
        with self._lock:
            self._open.put(client, (prepared.chain.last_key, len(keys), tokens))
            return (self._misses.get(client) or 0) < PATIENCE

    def seen(self, prepared: Prepared) -> bool | None:
        """Checks the open guess against a request that goes on from it; another branch leaves it open.

        Returns whether it was right, or None if there was none to check.
        """
        client, keys = (prepared.request.owner, prepared.session), prepared.chain.keys
        with self._lock:
            last_key, depth, tokens = self._open.get(client) or (b"", len(keys), ())
            if len(keys) <= depth or (depth and keys[depth - 1] != last_key):
                return None
            self._open.pop(client)
            right = prepared.prompt.tokens[: len(tokens)] == tokens
            self._misses.put(client, 0 if right else (self._misses.get(client) or 0) + 1)
            return right

    def stays(self, prepared: Prepared, head: tuple[str, ...]) -> bool:
        """Whether a client has just sent this head for the second time in a row: a clock in it is never worth it."""
        client, hashed = (prepared.request.owner, prepared.session), hash(head)
        with self._lock:
            before, times = self._heads.get(client) or (hashed, 0)
            times = times + 1 if before == hashed else 1
            self._heads.put(client, (hashed, times))
            return times == 2


def followers(answer: Message, transient: list[Message]) -> list[Message]:
    """Stand-ins for what the client sends after `answer`: results if it called tools, else words of the user.

    A client that ended its request with a transient message will end the next one with such a message too; templates
    look for the last user message.
    """
    results = [Message("tool", NEXT, tool_call_id=call.id, name=call.name) for call in answer.tool_calls]
    return [*(results or [Message("user", NEXT)]), *transient]


def known_until(text: str) -> int:
    """Characters of `text` before the stand-ins' words."""
    return max(text.find(NEXT), 0)
