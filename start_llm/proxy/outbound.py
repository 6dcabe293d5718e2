"""What another provider may not be sent of a request that was made for this server. Loaded by path, by `fallback.py`.

A conversation carries what this server gave its client to keep: signed thinking, sealed reasoning. Vendors check the
signatures and seals that they find, and refuse those that are not theirs. Parameters that only this server knows are
refused, too.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

SIGNED = b"start_llm thinking "
"""As in `api/anthropic/stream`; a test compares them."""
SEAL = "start_llm.1."
"""As in `api/openai/responses_items`."""
_OWN_SAMPLING = ("drafts", "min_p", "repetition_penalty", "repetition_context_size", "thinking_budget")
_OWN_PLACES = ("adapter", "chat_template_kwargs", "enable_thinking", "extra_body")
_OWN_SESSIONS = ("session_id", "conversation_id", "thread_id", "chat_id")
OWN_PARAMETERS = frozenset([*_OWN_SAMPLING, *_OWN_PLACES, *_OWN_SESSIONS])
"""A test goes by all the fields that the dialects read."""


def for_elsewhere(dialect: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` for another provider; what is not of this server stays as it is.

    Args:
        dialect: ``chat/completions``, ``messages`` or ``responses``.
    """
    kept = {name: value for name, value in body.items() if name not in OWN_PARAMETERS}
    if dialect != "messages":
        kept.pop("top_k", None)
    if dialect == "responses":
        if isinstance(kept.get("input"), list):
            kept["input"] = [item for item in kept["input"] if not _is_own_item(item)]
        return kept
    messages = kept.get("messages")
    if not isinstance(messages, list):
        return kept
    if dialect == "chat/completions":
        kept["messages"] = [_without(message, "reasoning_content", "reasoning") for message in messages]
        return kept
    kept["messages"] = [_unsigned(message) for message in messages]
    if kept["messages"] != messages:
        # A vendor that thinks wants its own thinking in front of the calls that it goes on from.
        kept = {name: value for name, value in kept.items() if name not in ("thinking", "context_management")}
    return kept


def _without(message: Any, *names: str) -> Any:
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    return {name: value for name, value in message.items() if name not in names}


def _unsigned(message: Any) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    blocks = [block for block in message["content"] if not _is_own_thinking(block)]
    if len(blocks) == len(message["content"]):
        return message
    return message | {"content": blocks or [{"type": "text", "text": "(thinking)"}]}


def _is_own_thinking(block: Any) -> bool:
    if not isinstance(block, dict) or block.get("type") != "thinking":
        return False
    signature = block.get("signature")
    if not signature:
        return True
    digest = hashlib.sha256(SIGNED + str(block.get("thinking", "")).encode("utf-8", "replace")).digest()
    return bool(signature == base64.b64encode(digest).decode("ascii"))


def _is_own_item(item: Any) -> bool:
    """A sealed item is this server's if the seal is; one without a seal can be read nowhere else."""
    if not isinstance(item, dict) or item.get("type") != "reasoning":
        return False
    sealed = item.get("encrypted_content")
    return not sealed or str(sealed).startswith(SEAL)
