"""`start_llm` with a hundredth of what it remembers beside KV: all of it is full after minutes, not after weeks.

What grows even then is a leak. The real bounds: 256 MiB of conversations, 32 million characters of messages whose facts
are kept, 8 million of messages that were searched for control tokens, 262,144 hashes of texts that were sent, 4,000,000
tokens whose KV was evicted, 8,192 owners of answers.
"""

from __future__ import annotations

import sys

from start_llm.__main__ import main
from start_llm.api.http import access
from start_llm.kvcache.types import StoreConfig
from start_llm.prompt import guard, reading, sent
from start_llm.prompt.tree import ConversationTree


def forget() -> int:
    """Serves; returns the exit code."""
    ConversationTree.__init__.__defaults__ = (2 << 20,)
    reading._KEPT_CHARS = 320_000
    guard._KEPT_CHARS = 80_000
    sent._KEPT = 1 << 12
    access.MOST_KEPT = 256
    *others, _ = StoreConfig.__init__.__defaults__ or ()
    StoreConfig.__init__.__defaults__ = (*others, 40_000)  # `ghost_tokens`, its last field
    return main()


if __name__ == "__main__":
    sys.exit(forget())
