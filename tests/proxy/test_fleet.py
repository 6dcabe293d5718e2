"""Which nodes are offered, and what they are asked; without LiteLLM."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial, wraps
from inspect import Signature, signature
from typing import Any

import pytest

from start_llm.core.errors import Unavailable
from start_llm.proxy import fleet as module
from start_llm.proxy.fleet import NodeFleet
from start_llm.proxy.nodes import ServerNode, look_at
from start_llm.proxy.routing import route_key
from tests.proxy.node_stub import NodeStub, nodes

WAIT = 60.0


def body(text: str, model: str = "served") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


@asynccontextmanager
async def watched(stubs: list[NodeStub], names: dict[str, str] | None = None) -> AsyncIterator[NodeFleet]:
    fleet = NodeFleet([ServerNode(stub.url, "key") for stub in stubs], names or {})
    fleet.watch()
    try:
        yield fleet
    finally:
        for task in fleet._watchers:
            task.cancel()
        await fleet.client.aclose()


@asynccontextmanager
async def loaded(stubs: list[NodeStub]) -> AsyncIterator[NodeFleet]:
    """`watched`, once all models are known."""
    async with watched(stubs) as fleet:
        await until(lambda: all(member.loaded for member in fleet.members.values()))
        yield fleet


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def on_nodes(count: int) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """For a test that is a coroutine: its first argument is `stubs`, that many nodes. Fixtures follow."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            with nodes(count) as stubs:
                asyncio.run(test(stubs, **fixtures))

        _, *wanted = signature(test).parameters.values()
        run.__signature__ = Signature(wanted)  # type: ignore[attr-defined]  # what pytest has to give
        return run

    return decorate


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine explains later than a user wants to wait."""
    monkeypatch.setattr(module, "EXPLAIN_SECONDS", 20.0)
    monkeypatch.setattr(module, "LOOK_EVERY", 0.05)


async def pick(fleet: NodeFleet, given: dict[str, Any], **more: Any) -> str:
    return (await fleet.pick(route_key(given, {}), explain=json.dumps(given).encode(), **more)).node.name


@on_nodes(3)
async def test_all_are_asked_what_they_have_stored(stubs: list[NodeStub]) -> None:
    stubs[1].stored = 900
    async with loaded(stubs) as fleet:
        assert await pick(fleet, body("new")) == stubs[1].name
        assert [stub.explained for stub in stubs] == [[body("new")]] * 3
        assert await pick(fleet, body("new")) == stubs[1].name
        assert [len(stub.explained) for stub in stubs] == [1, 1, 1], "a conversation that is known asks nobody"


@on_nodes(3)
async def test_a_node_that_claims_to_have_what_nobody_has_sent_is_not_believed(stubs: list[NodeStub]) -> None:
    stubs[0].stored, stubs[0].invents, stubs[1].stored = 1000, True, 600
    async with loaded(stubs) as fleet:
        assert [await pick(fleet, body(f"new {n}")) for n in range(4)] == [stubs[1].name] * 4
        stubs[0].invents, first = False, fleet.members[stubs[0].name]
        first.cards_at = -1e9
        await until(lambda: first.is_believed)
        assert await pick(fleet, body("newer")) == stubs[0].name


@on_nodes(3)
async def test_nobody_waits_for_a_late_answer(stubs: list[NodeStub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPLAIN_SECONDS", 0.05)
    async with loaded(stubs) as fleet:
        for stub in stubs:
            stub.mode = "frozen"
        began = time.monotonic()
        await pick(fleet, body("new"))
        assert time.monotonic() - began < WAIT / 3


@on_nodes(3)
async def test_a_late_answer_keeps_no_connection(stubs: list[NodeStub], monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx may lose a connection of its pool with a request that is cancelled. When all were lost, all nodes were
    silent for ever."""
    monkeypatch.setattr(module, "EXPLAIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "ask", partial(module.ask, seconds=WAIT))  # on a busy machine an answer takes long
    async with loaded(stubs) as fleet:
        for number in range(40):
            await pick(fleet, body(f"new {number}"))
        await until(lambda: not fleet._late)
        assert sum(len(stub.explained) for stub in stubs) == 40 * len(stubs), "they were asked to the end"
        # Now and then a watcher asks; to cancel one here could lose its connection.
        pool = fleet.client._transport._pool  # type: ignore[attr-defined]
        await until(lambda: all(connection.is_idle() or connection.is_closed() for connection in pool.connections))


@on_nodes(3)
async def test_requests_that_wait_keep_nobody_from_asking_how_a_node_is(stubs: list[NodeStub]) -> None:
    """By itself httpx has a hundred connections: the next question fails, and every node seems to be silent."""
    stubs[0].mode = "frozen"
    async with watched(stubs) as fleet:
        url = f"{stubs[0].url}/v1/embeddings"
        asking = [asyncio.create_task(fleet.client.post(url, json={}, timeout=2 * WAIT)) for _ in range(101)]
        await asyncio.sleep(0)
        await until(lambda: fleet.members[stubs[0].name].state == "silent")
        await until(lambda: fleet.members[stubs[1].name].state == "ready")  # a busy machine answers late, too
        stubs[0].mode = "ok"
        stubs[0].thaw.set()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize(("busy", "is_done"), [(0.5, True), (0.0, False)])
def test_an_answer_that_this_process_was_too_busy_to_read_is_not_late(busy: float, is_done: bool) -> None:
    async def answer() -> None:
        if not busy:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        for _ in range(9):  # it takes the loop a few rounds to read an answer
            await asyncio.sleep(0)

    async def test() -> None:
        asking = asyncio.create_task(answer())
        asyncio.get_running_loop().call_soon(time.sleep, busy)
        assert await NodeFleet([], {})._done_within([asking], 0.05) == ({asking} if is_done else set())

    asyncio.run(test())


@on_nodes(3)
async def test_new_conversations_are_placed_one_after_the_other(stubs: list[NodeStub]) -> None:
    async with loaded(stubs) as fleet:
        async with fleet._placing:
            waiting = asyncio.create_task(pick(fleet, body("new")))
            known = body("begun before")
            known["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
            assert await pick(fleet, known), "one that goes on does not wait"
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, WAIT)


@on_nodes(3)
async def test_a_conversation_that_goes_on_is_waited_for(
    stubs: list[NodeStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another proxy has begun it. What a new one may wait is over at once here."""
    monkeypatch.setattr(module, "EXPLAIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "EXPLAIN_AGAIN_SECONDS", 20.0)
    stubs[0].stored, stubs[1].stored, stubs[2].stored = 900, 950, 900
    async with loaded(stubs) as fleet:
        for number in range(6):
            given = body(f"begun elsewhere {number}")
            given["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
            assert await pick(fleet, given) == stubs[1].name


@on_nodes(3)
async def test_a_conversation_stays_at_a_node_that_is_late_and_leaves_one_that_is_frozen(stubs: list[NodeStub]) -> None:
    fleet = NodeFleet([ServerNode(stub.url, "key") for stub in stubs], {})
    home = fleet.members[await pick(fleet, body("begun"))]
    home.state, home.silent_seconds = "silent", 3.0
    assert await pick(fleet, body("begun")) == home.name
    assert {await pick(fleet, body(f"new {number}")) for number in range(6)}.isdisjoint({home.name})
    home.silent_seconds = module.SILENT_SECONDS + 1
    assert await pick(fleet, body("begun")) != home.name
    await fleet.client.aclose()


def test_a_frozen_node_is_waited_for_where_nobody_else_is_left() -> None:
    first, second = (ServerNode(f"http://127.0.0.1:{port}", "key") for port in (1, 2))
    fleet = NodeFleet([first, second], {})
    fleet.members[first.name].silent_seconds = 14.0
    assert fleet.gives_up(first.name, set()) and fleet.gives_up(first.name, {first.name})
    assert not fleet.gives_up(first.name, set(), begun=True)
    assert not fleet.gives_up(first.name, {first.name, second.name})
    fleet.members[second.name].state = "silent"
    assert not fleet.gives_up(first.name, set())
    fleet.members[first.name].silent_seconds = module.FROZEN_SECONDS + 1
    assert fleet.gives_up(first.name, set()) and fleet.gives_up(first.name, set(), begun=True)


@on_nodes(3)
async def test_a_model_that_is_not_loaded_is_not_loaded_by_a_question(stubs: list[NodeStub]) -> None:
    async with loaded(stubs) as fleet:
        for member in fleet.members.values():
            member.loaded = frozenset()
        await pick(fleet, body("new"))
        assert [stub.explained for stub in stubs] == [[], [], []]


@pytest.mark.parametrize("mode", ["loading", "gone"])
@on_nodes(3)
async def test_who_does_not_answer_is_left_out_and_comes_back(
    stubs: list[NodeStub], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.05, 0.1))
    async with watched(stubs) as fleet:
        member = fleet.members[stubs[0].name]
        await until(lambda: member.state == "ready")
        stubs[0].mode = mode
        await until(lambda: member.state == mode)
        for number in range(6):
            assert await pick(fleet, body(f"new {number}")) != stubs[0].name
        stubs[0].mode = "ok"
        await until(lambda: member.is_offered(time.monotonic()))


@on_nodes(3)
async def test_a_busy_proxy_blames_no_node(stubs: list[NodeStub], monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM computes for seconds at its first requests, and what comes meanwhile is read too late."""
    async with watched(stubs) as fleet:
        member = fleet.members[stubs[0].name]
        await until(lambda: member.state == "ready")
        monkeypatch.setattr(module, "LOOK_SECONDS", -1.0)  # each time-out comes later than it should
        stubs[0].mode = "frozen"
        await fleet._look(member)
        assert member.state == "ready" and member.silent_seconds == 0


@on_nodes(3)
async def test_a_silent_node_is_offered_last_and_then_not_at_all(stubs: list[NodeStub]) -> None:
    fleet = NodeFleet([ServerNode(stub.url) for stub in stubs], {})
    for member in fleet.members.values():
        member.state, member.silent_seconds = "silent", 3.0
    fleet.members[stubs[1].name].state, fleet.members[stubs[1].name].silent_seconds = "ready", 0.0
    assert await pick(fleet, body("x")) == stubs[1].name
    assert await pick(fleet, body("x"), tried=[stubs[1].name]) != stubs[1].name
    for member in fleet.members.values():
        member.state, member.silent_seconds = "silent", module.SILENT_SECONDS
    with pytest.raises(Unavailable):
        await pick(fleet, body("x"))
    await fleet.client.aclose()


@on_nodes(3)
async def test_pauses_grow_until_it_answers(stubs: list[NodeStub]) -> None:
    fleet = NodeFleet([ServerNode(stub.url) for stub in stubs], {})
    member = fleet.members[stubs[0].name]
    for pause in (1, 2, 4, 8, 15, 15, 15):
        before = time.monotonic()
        fleet.failed(member.name)
        assert before + pause <= member.out_until <= time.monotonic() + pause
    others = await fleet.pick(route_key(body("x"), {}), [stub.name for stub in stubs[1:]][:1])
    assert others.node.name == stubs[2].name
    with fleet.sending(others) as begun:
        begun()
    assert fleet.members[stubs[2].name].failures == 0
    await fleet.client.aclose()


@on_nodes(3)
async def test_a_node_whose_counts_are_no_numbers_harms_nobody(stubs: list[NodeStub]) -> None:
    stubs[0].mode = "lies"
    stubs[1].stored, stubs[1].running, stubs[1].waiting = 900, 3, 2
    told = await asyncio.to_thread(look_at, [ServerNode(stub.url, "key") for stub in stubs])
    assert [node["state"] for node in told] == ["ready"] * 3
    assert [(node["running"], node["waiting"]) for node in told] == [(0, 0), (3, 2), (0, 0)]
    stubs[1].running = stubs[1].waiting = 0
    async with loaded(stubs) as fleet:
        assert await pick(fleet, body("hello")) == stubs[1].name
        assert len(stubs[0].explained) == 1


@on_nodes(3)
async def test_what_all_nodes_refuse_leaves_a_node_for_others(stubs: list[NodeStub]) -> None:
    async with watched(stubs) as fleet:
        await until(lambda: all(member.state == "ready" for member in fleet.members.values()))
        for stub in stubs:
            for _ in range(10):
                fleet.failed(stub.name)
        assert await pick(fleet, body("another")) in {stub.name for stub in stubs}


@on_nodes(3)
async def test_no_node_is_left(stubs: list[NodeStub]) -> None:
    async with watched(stubs) as fleet:
        with pytest.raises(Unavailable, match=rf"No node is left .*{stubs[0].name}: it failed at this request"):
            await pick(fleet, body("x"), tried=[stub.name for stub in stubs])


@on_nodes(3)
async def test_a_model_that_one_node_lists(stubs: list[NodeStub]) -> None:
    stubs[1].models, stubs[2].models = ["served", "big"], ["other"]
    async with watched(stubs, {"made-up": "big"}) as fleet:
        await until(lambda: all(member.models for member in fleet.members.values()))
        for number in range(4):
            for name in ("big", "big+titles", "made-up"):
                assert await pick(fleet, body(f"a {number}", name)) == stubs[1].name
            assert await pick(fleet, body(f"b {number}", "served")) != stubs[2].name
        assert await pick(fleet, body("c", "nobody lists it")) in fleet.members


@on_nodes(3)
async def test_what_was_sent_since_counts(stubs: list[NodeStub]) -> None:
    """`/health` is a second old, and ten requests come within it."""
    fleet = NodeFleet([ServerNode(stub.url) for stub in stubs], {})
    sent = ExitStack()
    for number in range(9):
        choice = await fleet.pick(route_key(body(f"new {number}"), {}))
        sent.enter_context(fleet.sending(choice))
    assert [member.open for member in fleet.members.values()] == [3, 3, 3]
    sent.close()
    assert [member.open for member in fleet.members.values()] == [0, 0, 0]
    await fleet.client.aclose()


def test_every_node_has_a_main_model_whatever_it_lists() -> None:
    fleet = NodeFleet([ServerNode("http://one:1"), ServerNode("http://two:1")], {})
    one, two = fleet.members.values()
    one.models, two.models = None, frozenset({"big"})  # the first one's are not known yet
    assert fleet._serving("default") == [one, two] and fleet._serving("small") == [one]
