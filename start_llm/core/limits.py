"""What a request may hold at most. `docs/limits.md` lists every entry; a test compares the two.

A limit stands before the work that it bounds: a request over one is refused before anything is built from it. All are
far above what clients send. No setting raises them: whoever needs more would meet the context's limit first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `most` of `what`; beyond that the request is answered with `status`."""

    what: str
    most: int
    status: int = 400


class Allowance:
    """What all requests together may hold at a time; who finds too little left may wait for it. Thread-safe."""

    def __init__(self, most: float) -> None:
        self._left = self._most = most
        self._freed = threading.Condition()

    def take(self, amount: float, wait: float = 0.0) -> bool:
        """False: not within `wait` seconds. More than there ever is counts as all of it."""
        need = min(amount, self._most)
        with self._freed:
            if not self._freed.wait_for(lambda: self._left >= need, wait):
                return False
            self._left -= need
            return True

    def give_back(self, amount: float) -> None:
        with self._freed:
            self._left += min(amount, self._most)
            self._freed.notify_all()


# The body as a whole, counted in its bytes, before it is read as JSON.
VALUES = Limit("JSON values in a body", 500_000, 413)
KEYS = Limit("names of object members in a body", 200_000, 413)
ESCAPES = Limit("backslashes in a body", 4_000_000, 413)
DEPTH = Limit("lists and objects inside each other, in a body or in JSON that a field holds as text", 100)

# Fields of all dialects.
MESSAGES = Limit("messages, or items of `input`", 20_000)
TOOLS = Limit("tools, those of namespaces included", 2_000)
PROMPTS = Limit("prompts in one request (times `n`)", 64)
CHOICES = Limit("answers to one prompt (`n`)", 64)
NAME = Limit("characters of a tool's name", 256)
MODEL = Limit("characters of `model`", 512)
ADAPTER = Limit("characters of `adapter`", 100)
SESSION = Limit("characters of a session's or a user's id", 1_024)
STOPS = Limit("stop strings", 64)
STOP = Limit("characters of a stop string", 1_024)
STOPS_TOGETHER = Limit("characters of all stop strings together", 8_192)
BIAS = Limit("entries of `logit_bias`", 50_000)
IDLE_MINUTES = 10.0
"""IDLE_SHUTDOWN_MINUTES of a server that nobody started by name, if that is 0."""
QUANTISED_FROM = 5000
"""Token position from which KV_BITS quantises KV."""
MOST_BODY_BYTES = 64 << 20
"""Of a request's body."""
LOOK_BACK = Limit("`repetition_context_size`, in tokens", 1_000_000)
WORDS = Limit("entries of `include`, `modalities` and the like", 100)
VARIABLES = Limit("variables in `chat_template_kwargs`", 100)

# Texts that an encoder reads.
EMBEDDED = Limit("texts in one request for embeddings", 2_048)
EMBEDDED_TOKENS = Limit("tokens of all texts in one request for embeddings", 300_000)

# Recordings, and the forms that they come in.
FORM_PARTS = Limit("parts of a form (`multipart/form-data`)", 64)
FORM_HEADER = Limit("bytes of a part's header in a form", 4_096)
FORM_VALUE = Limit("bytes of a field of a form that is no file", 65_536)
RECORDED = Limit("seconds of a recording", 7_200)
SPOKEN_TEXT = Limit("characters of a text that is spoken", 4_096)
SPOKEN = Limit("seconds of speech that one text makes", 1_200)

# What an answer is held to: a response format, and the arguments of strict or forced tools. All of a request together.
SUBSCHEMAS = Limit("schemas (properties, items, alternatives, definitions) that an answer is held to", 3_000)
ENUM = Limit("values in the `enum` of a schema that an answer is held to", 20_000)
MULTIPLE = Limit("`multipleOf` in a schema that an answer is held to", 10_000)
LITERAL = Limit("characters of a name, a pattern or a text in the `const` or `enum` of such a schema", 20_000)
