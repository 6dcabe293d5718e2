"""What a rank refuses to divide, and whose tokens count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

from start_llm.core.errors import NotSupported
from start_llm.core.request import Sampling
from start_llm.engine.decode.sampling import make_sampler
from start_llm.engine.ranks.group import RankGroup


class Divisible:
    """A model that mlx-lm can divide."""

    def __init__(self) -> None:
        self.group: Any = None

    def shard(self, group: Any) -> None:
        self.group = group


def test_only_what_can_be_divided_is_divided() -> None:
    ranks, model, name = RankGroup(0, 2), Divisible(), "a/model"
    even = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": None}
    ranks.shard(model, name, even)
    ranks.shard(model, name, {"model_type": "qwen3_5", "text_config": even})
    with pytest.raises(NotSupported, match=r"a/model .* by 2 hosts: num_attention_heads=3\."):
        ranks.shard(model, name, {"model_type": "qwen3_5", "text_config": even | {"num_attention_heads": 3}})
    with pytest.raises(NotSupported, match="no shard for model_type oracle"):
        ranks.shard(SimpleNamespace(), name, {"model_type": "oracle"})


def test_rows_with_the_same_sampler_are_still_drawn_in_one_call() -> None:
    ranks = RankGroup(0, 2)
    assert ranks.sampler(greedy_sampler) is ranks.sampler(greedy_sampler)
    unseeded = make_sampler(Sampling())
    assert ranks.sampler(unseeded) is ranks.sampler(unseeded) is not ranks.sampler(greedy_sampler)


def test_tokens_are_rank_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[mx.array] = []
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, group: sent.append(array) or array)
    logprobs = mx.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    for rank in (0, 1):
        ranks = RankGroup(rank, 2)
        ranks._group = SimpleNamespace(rank=lambda rank=rank: rank)
        ranks.sampler(greedy_sampler)(logprobs)
    assert [array.tolist() for array in sent] == [[1, 0], [0, 0]]
