"""What routers are told of stored KV, against a model of what is held."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from start_llm.kvcache.blocks import PathHash, Tokens, as_tokens
from start_llm.kvcache.events import BLOCK, NewBlocks, PublishedBlocks, block_names
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.kinds import rounds
from tests.kvcache.tiny import known_cache

TOKEN_BYTES = 8  # of a known_cache


def run(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 500, length, dtype=np.int32)


def behind(tokens: Tokens, at: int) -> list[int]:
    """Names of the blocks that end behind this place."""
    return block_names(tokens[at:], hashlib.sha256(tokens[:at].tobytes()), at)


def announced(new: NewBlocks | None) -> NewBlocks:
    assert new is not None
    return new


def test_what_is_evicted_is_removed_last_block_first() -> None:
    blocks, tokens = PublishedBlocks(), run(400, 3)
    names = announced(blocks.announce(tokens, tokens, 400)).names
    assert blocks.release(behind(tokens, 200)) == names[3:][::-1]
    assert blocks.release(behind(tokens, 200)) == []
    assert len(blocks) == 3


def test_other_tokens_of_the_same_text_stand_and_fall_with_the_prompt() -> None:
    """A client leaves the reasoning out: 100 tokens alike, then 600 in the prompt where the client has 300."""
    blocks = PublishedBlocks()
    alike = run(100, 4)
    plain, prompt = np.concatenate([alike, run(300, 5)]), np.concatenate([alike, run(600, 6)])
    assert len(announced(blocks.announce(plain, prompt, 100)).names) == 1
    assert len(announced(blocks.announce(plain, prompt, len(prompt))).names) == 400 // BLOCK - 1
    gone = blocks.release(behind(prompt, 400))  # the later half of what differs
    assert gone == block_names(plain)[3:][::-1]


def test_a_block_stays_while_one_of_two_prompts_with_its_text_is_held() -> None:
    blocks = PublishedBlocks()
    plain, first, second = run(128, 7), run(200, 8), run(200, 9)
    assert len(announced(blocks.announce(plain, first, 200)).names) == 2
    assert blocks.announce(plain, second, 200) is None
    assert blocks.release(block_names(first)) == []
    assert sorted(blocks.release(block_names(second))) == sorted(block_names(plain))
    assert len(blocks) == 0


class Listener:
    """Keeps `PublishedBlocks` as the publisher does, without its thread."""

    def __init__(self) -> None:
        self.blocks, self.published = PublishedBlocks(), set[int]()

    def evicted(self, before: PathHash, start: int, raw: bytes) -> None:
        gone = self.blocks.release(block_names(raw, before.chain(), start))
        assert self.published.issuperset(gone)
        self.published.difference_update(gone)

    def cleared(self) -> None:
        self.blocks.clear()
        self.published.clear()

    def announce(self, tokens: Tokens, held: int) -> None:
        if (new := self.blocks.announce(tokens, tokens, held)) is not None:
            names = block_names(tokens)
            first, behind = names.index(new.names[0]), names.index(new.names[-1]) + 1
            assert new.names == names[first:behind] and new.tokens == tokens[first * BLOCK : behind * BLOCK].tolist()
            assert new.parent == (names[first - 1] if first else None)
            assert new.parent is None or new.parent in self.published
            assert self.published.isdisjoint(new.names)
            self.published.update(new.names)


@pytest.mark.parametrize("seed", range(rounds(6, 2)))
def test_what_is_published_is_what_the_store_would_restore(seed: int) -> None:
    """Random conversations with shared beginnings and forks in a store that holds a few of them."""
    chance, listener = random.Random(seed), Listener()
    kit = LayerKit(lambda: known_cache([]))
    store = KVStore(kit, StoreConfig(budget_bytes=2000 * TOKEN_BYTES), listener=listener)
    said = [tuple(chance.randrange(500) for _ in range(chance.randrange(64, 400))) for _ in range(3)]
    for _ in range(60):
        base = chance.choice(said)
        cut = chance.randrange(len(base) // 2, len(base) + 1)
        tokens = (*base[:cut], *(chance.randrange(500) for _ in range(chance.randrange(1, 300))))
        said.append(tokens)
        store.put(tokens, known_cache(tokens))
        listener.announce(as_tokens(tokens), store.peek(as_tokens(tokens), len(tokens)).length)
    assert store.stats()["evicted"] > 10
    held = {
        name
        for each in said
        for name in block_names(as_tokens(each))[: store.peek(as_tokens(each), len(each)).length // BLOCK]
    }
    assert listener.published == held
    store.clear()
    assert not listener.published
