"""What survives a restart, a kill and a damaged file."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.tree import ConversationTree, Node
from start_llm.prompt.turndb import DamagedNode, TurnDB, decode, encode
from tests.prompt.client import ECHOES, Client, pipeline, say, system_text

REPOSITORY = Path(__file__).parents[2]


def stored_pipeline(path: Path, family: str = "chatml", **changes: str) -> Pipeline:
    return pipeline(family, store=TurnDB(path), **changes)


def talk(pipe: Pipeline, turns: int = 3) -> Client:
    client = Client("chatml", pipe, ECHOES["stripped"])
    client.ask(system_text("You help.", "Current time is 1"), Message("user", "Go"))
    for step in range(turns):
        client.answer(say(f"\nStep {step}", f"Thought {step}", bash={"command": "ls"}))
        if step < turns - 1:
            client.ask(Message("tool", f"result {step} \ud800 ü", tool_call_id="call_bash"))
    return client


def nodes_of(pipe: Pipeline) -> list[Node]:
    return list(pipe._tree._nodes.values())


def rows(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        (count,) = connection.execute("SELECT COUNT(*) FROM nodes").fetchone()
    return int(count)


def test_a_key_stays_while_one_of_its_answers_is_evicted():
    """`ConversationTree.has` looks without the lock: a key that is gone for a moment would be a miss."""

    class Keys(dict[bytes, tuple[int, ...]]):
        def pop(self, key: bytes, *default: object) -> object:
            gone.append(key)
            return super().pop(key, *default)

    gone: list[bytes] = []
    node = nodes_of(talk(pipeline("chatml"), 1).pipe)[0]
    tree = ConversationTree(limit_bytes=1)
    tree._by_key = Keys()
    tree.add(node)
    other = replace(node, id=node.id + 1, answer_tokens=(*node.answer_tokens, 1))
    assert tree.add(other) is other and list(tree._nodes) == [other.id]
    assert tree.has(node.key) and not gone


def test_the_same_answer_to_the_same_prompt_is_kept_and_written_once(tmp_path):
    path = tmp_path / "turns.sqlite"
    pipe = stored_pipeline(path)
    for _ in range(2):
        client = Client("chatml", pipe)
        client.ask(system_text("You help."), Message("user", "Go"))
        client.answer(say("Yes."))
    pipe.close()
    assert len(pipe._tree) == rows(path) == 1


@pytest.mark.parametrize("where", [0, 40, -1])
def test_a_damaged_node_is_refused(where):
    blob = bytearray(encode(nodes_of(talk(pipeline("chatml")).pipe)[0]))
    blob[where] ^= 1
    with pytest.raises(DamagedNode):
        decode(bytes(blob))
    with pytest.raises(DamagedNode):
        decode(bytes(blob[: len(blob) // 2]))


def test_the_next_turn_after_a_restart_reuses_everything(tmp_path):
    path = tmp_path / "new" / "turns.sqlite"
    client = talk(stored_pipeline(path))
    client.pipe.close()
    client.pipe = stored_pipeline(path)
    client.messages[0] = system_text("You help.", "Current time is 2")
    prepared = client.ask(Message("tool", "last", tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(client.spoken)] == client.spoken
    assert "+Current time is 2" in prepared.notes
    client.pipe.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_turn_writes_what_is_new_in_it(tmp_path):
    pipe = stored_pipeline(tmp_path / "turns.sqlite")
    client = Client("chatml", pipe)
    client.ask(system_text("You help."), Message("user", "word " * 20_000))
    client.answer(say("First answer.", None, bash={"command": "ls"}))
    for step in range(3):
        client.ask(Message("tool", f"result {step}", tool_call_id="call_bash"))
        client.answer(say(f"Answer {step}.", None, bash={"command": "ls"}))
    first, *later = (len(encode(node)) for node in nodes_of(pipe)[::-1])
    sizes = sorted([first, *later])
    assert sizes[-1] > 5_000 and max(sizes[:-1]) < 2_000
    pipe.close()


@pytest.mark.parametrize("changes", [{"family": "qwen35"}, {"cache_drift_policy": "strict"}])
def test_another_template_or_policy_sees_no_nodes(tmp_path, changes):
    path = tmp_path / "turns.sqlite"
    talk(stored_pipeline(path)).pipe.close()
    other = stored_pipeline(path, **changes)
    assert len(other._tree) == 0
    other.close()
    assert rows(path) == 3


def test_a_damaged_row_is_left_out_with_what_goes_on_from_it(tmp_path, caplog):
    path = tmp_path / "turns.sqlite"
    pipe = stored_pipeline(path)
    talk(pipe)
    other = Client("chatml", pipe)
    other.ask(Message("user", "Elsewhere"))
    other.answer(say("Yes."))
    pipe.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE nodes SET blob = zeroblob(100) WHERE number = 2")
    again = stored_pipeline(path)
    assert len(again._tree) == 2 and "damaged" in caplog.text
    again.close()


@pytest.mark.parametrize("content", ["garbage", "old"])
def test_a_file_that_is_none_of_ours_is_set_aside(tmp_path, caplog, content):
    path = tmp_path / "turns.sqlite"
    if content == "garbage":
        path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, fingerprint TEXT, blob BLOB)")
    store = TurnDB(path)
    assert store.load("x") == []
    store.close()
    assert (tmp_path / "turns.sqlite.damaged").exists() and "set aside" in caplog.text


def test_two_servers_may_share_a_file(tmp_path):
    path = tmp_path / "turns.sqlite"
    pipelines = [stored_pipeline(path) for _ in range(2)]  # both are open before either has written
    for pipe, turns in zip(pipelines, (2, 4), strict=True):
        talk(pipe, turns)
    for pipe in pipelines:
        pipe.close()
    assert rows(path) == 6
    again = stored_pipeline(path)
    assert len(again._tree) == 6
    again.close()


def test_the_file_is_bounded_and_loses_whole_conversations(tmp_path):
    nodes = nodes_of(talk(pipeline("chatml")).pipe)
    root = next(node for node in nodes if node.parent is None)
    child = next(node for node in nodes if node.parent == root.id)
    size = len(encode(root)) + len(encode(child))
    store = TurnDB(tmp_path / "t.sqlite", limit_bytes=3 * size + 100)
    store.load("f")
    for number in range(10):
        store.save(replace(root, id=number * 2 + 1))
        store.save(replace(child, id=number * 2 + 2, parent=number * 2 + 1))
    store._writer.flush()
    assert [node.id for node in store.load("f")] == [15, 16, 17, 18, 19, 20]
    store.save(replace(child, id=21, parent=16))  # the oldest conversation is gone on with, and so is kept as a whole
    store._writer.flush()
    assert [node.id for node in store.load("f")] == [15, 16, 19, 20, 21]
    store.close()


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from start_llm.prompt import turndb
from start_llm.prompt.turndb import decode
turndb._GATHER_SECONDS = 0.0
store = turndb.TurnDB(Path(sys.argv[1]))
last = len(store.load("f"))
node = decode(Path(sys.argv[2]).read_bytes())
for number in range(last, last + 5000):
    store.save(replace(node, id=number + 1))
    if number == last + 20:
        store._writer.flush()
        print("going", flush=True)
"""


@pytest.mark.live
def test_a_kill_in_the_middle_of_writing_damages_nothing(tmp_path):
    node = next(node for node in nodes_of(talk(pipeline("chatml")).pipe) if node.parent is None)
    (tmp_path / "node").write_bytes(encode(node))
    for _ in range(2):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "t.sqlite"), str(tmp_path / "node")]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None and process.stdout.readline() == b"going\n"
            process.send_signal(signal.SIGKILL)
        store = TurnDB(tmp_path / "t.sqlite")
        stored = store.load("f")
        store.close()
        assert len(stored) >= 20 and all(replace(found, id=node.id) == node for found in stored)
