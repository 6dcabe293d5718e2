"""Every public method of the conversation tree and of its file raises once, at each place that calls it.

Two conversations are played, turn by turn beside each other. The fault ends the call that it is met in; that client
asks again. The other one's prompts are those of a run without a fault, nobody waits for an answer that was never
recorded, and after it all goes on as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.messages import Message
from start_llm.prompt import tree
from start_llm.prompt.tree import ConversationTree
from start_llm.prompt.turndb import TurnDB
from tests.prompt.client import CLAUDE, CLEARED, ECHOES, Client, pipeline, say, system_text

METHODS: dict[type, tuple[str, ...]] = {
    ConversationTree: ("at", "has", "result_of", "arrange", "add", "__len__"),
    TurnDB: ("save",),
}
Site = tuple[str, str, int]
"""A method, and the file and line that call it."""


class Fault(Exception):
    """What is raised."""


@contextmanager
def watched(on_call: Callable[[Site], None]) -> Iterator[None]:
    def wrapped(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if "start_llm" in Path(caller.f_code.co_filename).parts:
                on_call((name, Path(caller.f_code.co_filename).name, caller.f_lineno))
            return method(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in METHODS.items():
            for name in names:
                patch.setattr(owner, name, wrapped(getattr(owner, name), f"{owner.__name__}.{name}"))
        yield


class Life:
    """Two clients of one server.

    Attributes:
        prompts: of each client, in order; only of requests that were answered.
        faults: which client met the fault.
    """

    def __init__(self, path: Path) -> None:
        self.pipe = pipeline("chatml", store=TurnDB(path))
        self.clients = {name: Client("chatml", self.pipe, ECHOES["stripped"], session=name) for name in "ab"}
        self.prompts: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
        self.faults: list[str] = []

    def meets_fault(self, name: str, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Fault:
            self.faults.append(name)
            return True
        return False

    def turn(self, name: str, answer: Message, *new: Message) -> None:
        client = self.clients[name]
        client.messages += new
        if self.meets_fault(name, client.ask):
            client.ask()
        self.prompts[name].append(client.prepared.prompt.tokens)
        if self.meets_fault(name, lambda: client.answer(answer)):  # as the recorder does: it is not remembered
            client.messages.append(client.echo(answer))

    def play(self) -> None:
        for step in range(4):
            for name, client in self.clients.items():
                if step == 0:
                    begin = system_text(CLAUDE, f"You help {name}.", "Mode: 0"), Message("user", f"Go, {name}")
                    self.turn(name, say(f"I am {name}.", "Hm.", read={"path": f"{name}.py"}), *begin)
                    continue
                client.messages[0] = system_text(CLAUDE, f"You help {name}.", f"Mode: {step}")
                if step == 3:
                    client.messages[3] = Message("tool", CLEARED, tool_call_id="call_read")
                    client.tools = client.tools[::-1]
                called = "call_read" if step == 1 else "call_bash"
                result = Message("tool", f"result {step} of {name}", tool_call_id=called)
                self.turn(name, say(f"Step {step}.", f"Thought {step}", bash={"command": f"ls {name}"}), result)
            self.meets_fault("", self.pipe.counters)  # as `/metrics` asks for them
        self.pipe.close()


def lived(path: Path, on_call: Callable[[Site], None]) -> Life:
    life = Life(path)
    with watched(on_call):
        life.play()
    return life


@pytest.mark.timeout(120)
def test_a_fault_anywhere_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree.secrets, "token_urlsafe", lambda size: "0" * 6)  # a note's tag
    sites: dict[Site, None] = {}
    plain = lived(tmp_path / "plain", lambda site: sites.setdefault(site))
    assert plain.faults == []
    assert {name.rpartition(".")[2] for name, _, _ in sites} >= {"at", "has", "add", "arrange", "save"}
    assert len(sites) >= 8
    for number, fault in enumerate(sites):
        raised: list[Site] = []

        def on_call(site: Site, fault: Site = fault, raised: list[Site] = raised) -> None:
            if site == fault and not raised:
                raised.append(site)
                raise Fault

        life = lived(tmp_path / str(number), on_call)
        assert len(life.faults) == 1, (fault, life.faults)
        for name in {"a", "b"} - set(life.faults):
            assert life.prompts[name] == plain.prompts[name], fault
        assert all(len(prompts) == 4 for prompts in life.prompts.values())
        restarted = Life(tmp_path / str(number))
        assert len(restarted.pipe._tree) >= 4, fault  # what goes on from an answer that is not on disk is lost with it
        restarted.pipe.close()
