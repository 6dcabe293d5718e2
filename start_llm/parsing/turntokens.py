"""Tokens that end or begin a turn. In an answer they are leaks: they are left out, or the answer is over.

A model whose end token is not known to its tokenizer goes on behind it, and plays the user or the tools.
"""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.parsing.source import Source, Step

ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
STARTS: Mapping[str, str] = {
    "<|im_start|>": "\n",
    "<start_of_turn>": "\n",
    "<|start_header_id|>": "<|end_header_id|>",
}
"""By token: what ends the role that stands behind it."""
LEAKED = (*ENDS, *STARTS, "<|im_start|>assistant\n")
_OWN_ROLES = ("assistant", "model", "ai")
_OTHER_ROLES = ("user", "system", "developer", "tool", "ipython", "function", "observation", "human")
_MAX_ROLE = 16


def turn_ends(source: Source, offset: int, more: tuple[str, ...] = (), *, roles: bool = True) -> Step[bool]:
    """Whether the turn ends at `offset`, or a piece of markup out of `more` stands there.

    A turn token alone proves nothing, since a value may talk about such tokens: the text must end behind it, or `more`
    follow, or (with `roles`) the role of a new turn.
    """
    leaked = ""
    while True:
        offset = yield from source.blank(offset)
        if not (yield from source.ahead(offset)) or (yield from source.starts(more, offset)):
            return True
        if roles and leaked in STARTS and (yield from source.starts((*_OWN_ROLES, *_OTHER_ROLES), offset)):
            return True
        leaked = yield from source.starts((*ENDS, *STARTS), offset)
        if not leaked:
            return False
        offset += len(leaked)


def other_turn(source: Source, token: str) -> Step[bool]:
    """Consumes the role behind a turn's first `token`; whether it is somebody else's."""
    role = yield from source.starts((*_OWN_ROLES, *_OTHER_ROLES))
    if not role:
        return False
    closer = STARTS[token]
    if not (yield from source.starts((closer,), len(role))):
        return False
    source.take(len(role) + len(closer))
    if closer != "\n":
        yield from source.skip("\n")
    return role in _OTHER_ROLES
