"""The work of the benchmark of nodes, and how it judges answers."""

from __future__ import annotations

import httpx
import pytest

from scripts import bench_nodes as bench
from start_llm.proxy.asgi import last_event


def test_the_work_is_as_it_is_described() -> None:
    work = bench.workload("a", 12, 3, 8)
    assert work == bench.workload("a", 12, 3, 8)
    assert sum(len(each.turns) for each in work) == 12 * 8 + 6 * 3
    assert len({each.system for each in work}) == 6, "three system texts, and three of sub-agents"
    assert not {each.system for each in work} & {each.system for each in bench.workload("b", 12, 3, 8)}
    assert len([each for each in work if each.begins == 4 and len(each.turns) == 4]) == 3, "fresh starts"


WHOLE = {
    "chat/completions": 'data: {"id": "chatcmpl-%d"}\n\ndata: [DONE]\n\n',
    "messages": 'event: message_start\ndata: {"type": "message_start", "message": {"id": "m%d"}}\n\n'
    "event: message_stop\ndata: {}\n\n",
    "responses": 'data: {"type":"response.created","response":{"id":"r%d"}}\n\n'
    'data: {"response":{},"type":"response.completed"}\n\n',
}


@pytest.mark.parametrize("dialect", WHOLE)
def test_a_stream_is_whole_broken_or_neither(dialect: str) -> None:
    found, begun = bench.Kills(), (WHOLE[dialect] % 1).split("\n\n")[0] + "\n\n"
    broken = begun + last_event(dialect, {"message": "The connection broke.", "type": "server_error"}).decode()
    for text in (WHOLE[dialect] % 1, broken, begun, WHOLE[dialect] % 1 + WHOLE[dialect] % 2):
        bench._judge(dialect, httpx.Response(200, text=text), found)
    bench._judge(dialect, httpx.Response(503, text="{}"), found)
    assert (found.answered, found.broken, len(found.failed)) == (1, 1, 3)
    assert "2 answers in one" in found.failed[1]
