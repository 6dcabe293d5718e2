"""Which stored KV routers are told of, in blocks of 64 tokens. Knows no socket and no MLX.

A router (llm-d, Dynamo) makes tokens of what a client sends and compares these with the blocks that it was told of. The
prompt of this server can have other tokens: reasoning that is given back, notes, blocks that are shown as before. So a
block is made of the *plain* tokens, those of the template applied to the client's messages, and it is published as long
as KV is held of the *prompt* tokens that this text became.

Up to the first token that differs both are the same. Behind it a place in the plain tokens stands for the place in the
prompt that is as far on the way to its end. That is a guess: it matters only while a part of a conversation is held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from start_llm.kvcache.blocks import Tokens, common_prefix
from start_llm.kvcache.types import RestorePlan

if TYPE_CHECKING:  # few have what it imports
    from start_llm.kvcache.publisher import KVEventPublisher

type KVEvents = KVEventPublisher
"""Is told what a store gave up, and publishes what is held."""

BLOCK = 64
"""Tokens of a block. A router has to be configured with the same number."""
_TOKEN = 4  # bytes

Peek = Callable[[Tokens, int], RestorePlan]


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks that follow each other and were not published before."""

    names: list[int]
    parent: int | None  # the name of the block before the first one
    tokens: list[int]  # of all of them


class PublishedBlocks:
    """The published blocks, and what KV each of them stands for. One thread.

    A block's name is the first 8 bytes of the SHA-256 of all tokens up to its end.
    """

    def __init__(self) -> None:
        self._carriers: dict[int, set[int]] = {}  # of a published block: blocks of prompts; each of them is enough
        self._carried: dict[int, set[int]] = {}  # the other way round

    def __len__(self) -> int:
        return len(self._carriers)

    def announce(self, plain: Tokens, prompt: Tokens, held: int) -> NewBlocks | None:
        """KV of the first `held` tokens of `prompt` is held. Returns what is new by that."""
        common = common_prefix(plain, prompt)
        names = block_names(plain)
        shared = common // BLOCK
        chain = hashlib.sha256(prompt[: shared * BLOCK].tobytes())
        carriers = names[:shared] + block_names(prompt[shared * BLOCK :], chain, shared * BLOCK)
        stretch = (len(prompt) - common) / max(1, len(plain) - common)
        first, count = len(names), 0
        for index, name in enumerate(names):
            end = (index + 1) * BLOCK
            place = end if end <= common else common + round((end - common) * stretch)
            if place > held or not carriers:
                break
            carrier = carriers[min(-(-place // BLOCK), len(carriers)) - 1]
            if name not in self._carriers:
                first = min(first, index)
            self._carriers.setdefault(name, set()).add(carrier)
            self._carried.setdefault(carrier, set()).add(name)
            count = index + 1
        if first >= count:
            return None
        parent = names[first - 1] if first else None
        return NewBlocks(names[first:count], parent, plain[first * BLOCK : count * BLOCK].tolist())

    def release(self, carriers: Iterable[int]) -> list[int]:
        """KV of these blocks of prompts is gone. Returns the published blocks that go with it, the last one first."""
        gone = []
        for carrier in carriers:
            for name in self._carried.pop(carrier, ()):
                left = self._carriers[name]
                left.discard(carrier)
                if not left:
                    del self._carriers[name]
                    gone.append(name)
        return gone[::-1]

    def clear(self) -> None:
        self._carriers.clear()
        self._carried.clear()


def block_names(tokens: Tokens | bytes, chain: hashlib._Hash | None = None, start: int = 0) -> list[int]:
    """Names of the blocks that end within a run of tokens; `chain`: of the `start` tokens before it."""
    raw = memoryview(tokens if isinstance(tokens, bytes) else tokens.tobytes())
    chain = hashlib.sha256() if chain is None else chain.copy()
    names: list[int] = []
    begin = 0
    for end in range((BLOCK - start % BLOCK) * _TOKEN, len(raw) + 1, BLOCK * _TOKEN):
        chain.update(raw[begin:end])
        names.append(int.from_bytes(chain.digest()[:8]))
        begin = end
    return names
