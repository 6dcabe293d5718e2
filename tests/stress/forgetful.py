"""`start_llm` with a hundredth of what it remembers beside KV: all of it is full after minutes, not after weeks.

What grows even then is a leak. The real bounds: 256 MiB of conversations, 32 million characters of messages whose facts
are kept, 8 million of messages that were made ready for a template, 262,144 hashes of texts that were sent, 1,048,576
tokens of other forms of tool results, 4,000,000 tokens whose KV was evicted, 8,192 owners of answers, 4,096
conversations whose end is protected.
"""

from __future__ import annotations

import sys

from start_llm.__main__ import main
from start_llm.api.http import access
from start_llm.kvcache.sessions import Sessions
from start_llm.kvcache.types import StoreConfig
from start_llm.prompt import fit, reading, sent
from start_llm.prompt.drafts import Views
from start_llm.prompt.tree import ConversationTree


def forget() -> int:
    """Serves; returns the exit code."""
    ConversationTree.__init__.__defaults__ = (2 << 20,)
    assert Views.__init__.__kwdefaults__ is not None
    Views.__init__.__kwdefaults__["most_tokens"] = 1 << 13
    for module, name, value in (
        (reading, "_KEPT_CHARS", 320_000),
        (fit, "_KEPT_CHARS", 80_000),
        (sent, "_KEPT", 1 << 12),
        (access, "MOST_KEPT", 256),
    ):
        assert getattr(module, name) > value, f"{module.__name__}.{name} is not what is kept"
        setattr(module, name, value)
    assert Sessions.__init__.__defaults__ == (4096,)
    Sessions.__init__.__defaults__ = (64,)
    *others, ghosts = StoreConfig.__init__.__defaults__ or ()
    assert ghosts > 1_000_000, "its last field is `ghost_tokens`"
    StoreConfig.__init__.__defaults__ = (*others, 40_000)
    return main()


if __name__ == "__main__":
    sys.exit(forget())
