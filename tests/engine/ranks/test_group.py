"""What a rank refuses to divide, and whose tokens count."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

from start_llm.core.errors import NotSupported
from start_llm.core.request import Sampling
from start_llm.engine.decode.sampling import make_sampler
from start_llm.engine.ranks.group import MOST_SAMPLERS, RankGroup
from start_llm.host.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


class Rank(RankGroup):
    """One that nobody else is with."""

    def agree(self, value: Any) -> Any:
        return value

    def confirm(self, digest: int) -> None: ...

    def loaded(self) -> None: ...

    def fail(self, why: str) -> NoReturn:
        raise SystemExit(why)


class Divisible:
    """A model that mlx-lm can divide."""

    def __init__(self) -> None:
        self.group: Any = None

    def shard(self, group: Any) -> None:
        self.group = group


def test_only_what_can_be_divided_is_divided() -> None:
    ranks, model, name = Rank(0, 2), Divisible(), "a/model"
    even = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": None}
    ranks.shard(model, name, even)
    ranks.shard(model, name, {"model_type": "qwen3_5", "text_config": even})
    with pytest.raises(NotSupported, match=r"a/model .* by 2 hosts: num_attention_heads=3\."):
        ranks.shard(model, name, {"model_type": "qwen3_5", "text_config": even | {"num_attention_heads": 3}})
    with pytest.raises(NotSupported, match="no shard for model_type oracle"):
        ranks.shard(SimpleNamespace(), name, {"model_type": "oracle"})


def test_rows_with_the_same_sampler_are_still_drawn_in_one_call() -> None:
    ranks = Rank(0, 2)
    assert ranks.sampler(greedy_sampler) is ranks.sampler(greedy_sampler)
    unseeded = make_sampler(Sampling())
    assert ranks.sampler(unseeded) is ranks.sampler(unseeded) is not ranks.sampler(greedy_sampler)
    for _ in range(MOST_SAMPLERS + 9):
        ranks.sampler(lambda logprobs: logprobs)
    assert ranks._shared_sampler.cache_info().currsize <= MOST_SAMPLERS


def test_the_next_machine_of_the_ring_must_be_reached() -> None:
    ranks = Rank(0, 2)
    ranks.addresses = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    with pytest.raises(SystemExit, match=rf"rank 1 \({ranks.addresses[1]}\) cannot be reached from rank 0: .*refused"):
        ranks.connect(0)
    with socket.create_server(("127.0.0.1", int(ranks.addresses[1].rpartition(":")[2]))):
        ranks._reach_neighbour()
    with socket.create_server(("127.0.0.1", int(ranks.addresses[0].rpartition(":")[2]))):
        pass  # its own port is free for the ring


def test_no_rank_goes_on_to_the_ring_while_another_one_still_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of the quicker one would connect to the slower one's first socket, and both would wait for ever."""
    ranks, port = Rank(0, 2), free_port()
    ranks.addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"]
    listens: list[bool] = []

    def meet() -> None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            listens.append(False)
        else:
            listens.append(True)

    monkeypatch.setattr(ranks, "_meet", meet)
    with socket.create_server(("127.0.0.1", int(ranks.addresses[1].rpartition(":")[2]))):
        ranks._reach_neighbour()
    assert listens == [True, True, False]


RING_THAT_NEVER_COMES = """
import ctypes
from start_llm.engine.ranks import group
from tests.engine.ranks.test_group import Rank

group.RING_SECONDS = group.WORDS_SECONDS = 0.2
group.mx.distributed.init = lambda **about: ctypes.PyDLL(None).sleep(600)  # it keeps Python's lock
rank = Rank(0, 2)
rank._reach_neighbour = lambda: None
rank.connect(0)
"""


@pytest.mark.live
def test_a_ring_that_never_comes_ends_the_process() -> None:
    command = [sys.executable, "-c", RING_THAT_NEVER_COMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGALRM, done.stderr  # 1 would say that another start is of no use
    assert "Timeout" in done.stderr and "in connect" in done.stderr


def test_tokens_are_rank_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[mx.array] = []
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, group: sent.append(array) or array)
    logprobs = mx.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    for rank in (0, 1):
        ranks = Rank(rank, 2)
        ranks._group = SimpleNamespace(rank=lambda rank=rank: rank)
        ranks.sampler(greedy_sampler)(logprobs)
    assert [array.tolist() for array in sent] == [[1, 0], [0, 0]]
