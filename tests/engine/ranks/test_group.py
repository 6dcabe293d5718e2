"""What a rank refuses to divide, and whose tokens count."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

from start_llm.core.errors import NotSupported
from start_llm.core.request import Sampling
from start_llm.engine.decode.sampling import make_sampler
from start_llm.engine.ranks import group
from start_llm.engine.ranks.group import MOST_SAMPLERS, RankGroup
from start_llm.host.ports import free_port
from tests.waiting import until

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
    assert len(ranks._samplers) <= MOST_SAMPLERS


def test_all_ranks_have_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "REACH_SECONDS", 0.5)
    first, second = (Rank(rank, 2) for rank in range(2))
    first.addresses = second.addresses = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    first.token = second.token = "of all"
    with pytest.raises(SystemExit, match=rf"rank 1 \({first.addresses[1]}\) cannot be reached from rank 0"):
        first.connect(0)
    with (
        socket.create_server(("127.0.0.1", int(first.addresses[1].split(":")[1]))),  # it listens, and never connects
        pytest.raises(SystemExit, match=rf"rank 1 \({first.addresses[1]}\) has not connected"),
    ):
        first.connect(0)


RING_THAT_NEVER_COMES = """
import ctypes
from start_llm.engine.ranks import group
from tests.engine.ranks.test_group import Rank

group.RING_SECONDS = group.WORDS_SECONDS = 0.2
group.mx.distributed.init = lambda **about: ctypes.PyDLL(None).sleep(600)  # it keeps Python's lock
rank = Rank(0, 2)
rank._meet_neighbours = lambda: None
rank.connect(0)
"""


@pytest.mark.live
def test_a_ring_that_never_comes_ends_the_process() -> None:
    command = [sys.executable, "-c", RING_THAT_NEVER_COMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGALRM, done.stderr  # 1 would say that another start is of no use
    assert "Timeout" in done.stderr and "in connect" in done.stderr


def knocks(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return True
    return False


def test_neighbours_meet_whatever_strangers_send() -> None:
    ranks, ports = [Rank(rank, 3) for rank in range(3)], [free_port() for _ in range(3)]
    for rank in ranks:
        rank.addresses, rank.token = [f"127.0.0.1:{port}" for port in ports], "of all"
    met = SimpleQueue[int]()

    def meet(rank: Rank) -> None:
        rank._meet_neighbours()
        met.put(rank.rank)

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in ranks]
    threads[0].start()
    until(lambda: knocks(ports[0]))
    for thread in threads[1:]:
        thread.start()
    assert {met.get(timeout=60) for _ in ranks} == {0, 1, 2}


def test_tokens_are_rank_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[mx.array] = []
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, group: sent.append(array) or array)
    logprobs = mx.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    for rank in (0, 1):
        ranks = Rank(rank, 2)
        ranks._group = SimpleNamespace(rank=lambda rank=rank: rank)
        ranks.sampler(greedy_sampler)(logprobs)
    assert [array.tolist() for array in sent] == [[1, 0], [0, 0]]
