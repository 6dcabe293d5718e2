"""Fields that only this server knows: how they pass LiteLLM, and that no other provider gets them.

LiteLLM (1.106) passes chat completions on with every field, but leaves out of messages and responses what their vendors
do not know. An adapter goes with the model's name, which passes in every dialect; the rest of a Responses request
goes in `extra_body`, which LiteLLM unfolds. For messages there is no such place.

A conversation also carries what this server gave its client to keep: signed thinking, sealed reasoning. Vendors check
the signatures and seals that they find, and refuse those that are not theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from start_llm.core.modelmap import ADAPTER_SIGN
from start_llm.core.protocol import SEAL, SESSION_FIELDS, thinking_signature

ADAPTER = "adapter"
EXTRA = "extra_body"
_SAMPLING = ("drafts", "repetition_guard", "min_p", "repetition_penalty", "repetition_context_size", "thinking_budget")
_PLACES = (ADAPTER, "chat_template_kwargs", "enable_thinking", EXTRA)
OWN_FIELDS = frozenset([*_SAMPLING, *_PLACES, *SESSION_FIELDS])
"""A test goes by all the fields that the dialects read."""
_NOT_OPENAIS = OWN_FIELDS | {"top_k"}


def fold(dialect: str, body: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`body` with its own fields in places that LiteLLM passes on; `body` itself where nothing is to move. `dialect`:
    the path behind ``/v1/``. `names`: the server's names of models, by those that it does not know."""
    body = _with_adapter(body, names)
    moved = {name: body[name] for name in body if name in _NOT_OPENAIS}
    if not moved or dialect != "responses":
        return body
    nested = moved.pop(EXTRA, None)
    others = {name: value for name, value in body.items() if name not in _NOT_OPENAIS}
    return others | {EXTRA: moved | (nested if isinstance(nested, dict) else {})}


def _with_adapter(body: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """With `adapter` as a part of the model's name, whatever it is: the server says what is wrong with it."""
    nested: dict[str, Any] = body[EXTRA] if isinstance(body.get(EXTRA), dict) else {}
    model = body.get("model")
    adapter = nested.get(ADAPTER) if body.get(ADAPTER) is None else body[ADAPTER]
    if adapter is None or not isinstance(model, str):
        return body
    kept = {name: value for name, value in body.items() if name != ADAPTER}
    if ADAPTER in nested:
        kept[EXTRA] = {name: value for name, value in nested.items() if name != ADAPTER}
    return kept | {"model": f"{names.get(model, model)}{ADAPTER_SIGN}{adapter}"}


def for_provider(dialect: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` for another provider: without own fields, thinking and reasoning. `dialect`: the path behind ``/v1/``."""
    kept = {name: value for name, value in body.items() if name not in OWN_FIELDS}
    if dialect != "messages":
        kept.pop("top_k", None)
    field = "input" if dialect == "responses" else "messages"
    history = kept.get(field)
    if not isinstance(history, list):
        return kept
    kept[field] = _others_history(dialect, history)
    if dialect == "messages" and kept[field] != history:
        # A vendor that thinks wants its own thinking in front of the calls that it goes on from.
        return {name: value for name, value in kept.items() if name not in ("thinking", "context_management")}
    return kept


def _others_history(dialect: str, history: list[Any]) -> list[Any]:
    """Without what only this server reads, or signed."""
    if dialect == "responses":
        return [item for item in history if not _is_own_item(item)]
    return [(_unsigned if dialect == "messages" else _thoughtless)(message) for message in history]


def _thoughtless(message: Any) -> Any:
    """An assistant's message without what it has thought."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    return {name: value for name, value in message.items() if name not in ("reasoning_content", "reasoning")}


def _unsigned(message: Any) -> Any:
    """A message without this server's thinking; a word stands where nothing is left."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    blocks = [block for block in message["content"] if not _is_own_thinking(block)]
    if len(blocks) == len(message["content"]):
        return message
    return message | {"content": blocks or [{"type": "text", "text": "(thinking)"}]}


def _is_own_thinking(block: Any) -> bool:
    """Whether this server signed it; a vendor refuses thinking without its signature, too."""
    if not isinstance(block, dict) or block.get("type") != "thinking":
        return False
    signed = block.get("signature")
    return not signed or bool(signed == thinking_signature(str(block.get("thinking", ""))))


def _is_own_item(item: Any) -> bool:
    """A sealed item is this server's if the seal is; one without a seal can be read nowhere else."""
    if not isinstance(item, dict) or item.get("type") != "reasoning":
        return False
    sealed = item.get("encrypted_content")
    return not sealed or str(sealed).startswith(SEAL)
