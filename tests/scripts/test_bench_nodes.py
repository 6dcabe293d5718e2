"""The work of the benchmark of nodes, and how it judges answers."""

from __future__ import annotations

import httpx

from scripts import bench_nodes as bench


def test_the_work_is_as_it_is_described() -> None:
    work = bench.workload("a", 12, 3, 8)
    assert work == bench.workload("a", 12, 3, 8)
    assert sum(len(each.turns) for each in work) == 12 * 8 + 6 * 3
    assert len({each.system for each in work}) == 6, "three system texts, and three of sub-agents"
    assert not {each.system for each in work} & {each.system for each in bench.workload("b", 12, 3, 8)}
    assert len([each for each in work if each.begins == 4 and len(each.turns) == 4]) == 3, "fresh starts"


def test_a_stream_is_whole_broken_or_neither() -> None:
    for dialect, text in {
        "chat/completions": "data: {}\n\ndata: [DONE]\n\n",
        "messages": "event: message_stop\ndata: {}\n\n",
        "responses": "event: response.completed\ndata: {}\n\n",
    }.items():
        found = bench.Kills()
        for said in (text, bench._BROKEN[dialect], "data: {}\n\n", text + text):
            bench._judge(dialect, httpx.Response(200, text=said), found)
        assert (found.answered, found.broken, len(found.failed)) == (1, 1, 2)


def test_two_answers_in_one_are_found() -> None:
    chunk = 'data: {"id": "chatcmpl-%d"}\n\n'
    found = bench.Kills()
    for numbers in ((1, 1), (1, 2)):
        text = "".join(chunk % number for number in numbers) + "data: [DONE]\n\n"
        bench._judge("chat/completions", httpx.Response(200, text=text), found)
    assert found.answered == 1 and "two answers" in found.failed[0]
