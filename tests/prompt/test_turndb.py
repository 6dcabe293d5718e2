"""What survives a restart, a kill and a damaged file."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.heal import Healed
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.turncodec import DamagedRecord, decode, encode
from start_llm.prompt.turndb import TurnDB
from start_llm.prompt.volatile import Rules
from tests.prompt.client import ECHOES, Client, pipeline, say, settings
from tests.prompt.models import model

REPOSITORY = Path(__file__).parents[2]


def stored_pipeline(path: Path, family: str = "chatml") -> Pipeline:
    template, tokenizer = model(family)
    return Pipeline(template, tokenizer, settings=settings(), rules=Rules.load(None), store=TurnDB(path))


def talk(pipe: Pipeline, turns: int = 3) -> Client:
    client = Client("chatml", pipe, ECHOES["stripped"])
    client.ask(Message("system", "You help.\nCurrent time is 1"), Message("user", "Go"))
    for step in range(turns):
        client.answer(say(f"\nStep {step}", f"Thought {step}", bash={"command": "ls"}))
        if step < turns - 1:
            client.ask(Message("tool", f"result {step} \ud800 ü", tool_call_id="call_bash"))
    return client


def record_of(client: Client):
    ((_, record),) = list(client.pipe._turns.records())
    return record


def test_a_record_comes_back_as_it_was():
    record = record_of(talk(pipeline("chatml")))
    assert decode(encode(record)) == record


@pytest.mark.parametrize("where", [0, 40, -1])
def test_a_damaged_record_is_refused(where):
    blob = bytearray(encode(record_of(talk(pipeline("chatml")))))
    blob[where] ^= 1
    with pytest.raises(DamagedRecord):
        decode(bytes(blob))
    with pytest.raises(DamagedRecord):
        decode(bytes(blob[: len(blob) // 2]))


def test_the_next_turn_after_a_restart_reuses_everything(tmp_path):
    path = tmp_path / "new" / "turns.sqlite"
    client = talk(stored_pipeline(path))
    client.pipe.close()
    client.pipe = stored_pipeline(path)
    client.messages[0] = Message("system", "You help.\nCurrent time is 2")
    prepared = client.ask(Message("tool", "last", tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(client.spoken)] == client.spoken
    assert prepared.notes == ("Current time is 2",)
    client.pipe.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_replaced_records_leave_the_file(tmp_path):
    path = tmp_path / "turns.sqlite"
    talk(stored_pipeline(path), 5).pipe.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM records").fetchone() == (1,)
        assert connection.execute("SELECT COUNT(*) FROM healing").fetchone() == (5,)


def test_another_template_sees_no_records_but_heals(tmp_path):
    path = tmp_path / "turns.sqlite"
    talk(stored_pipeline(path)).pipe.close()
    other = stored_pipeline(path, "qwen35")
    assert len(other._turns) == 0 and len(other._healing) == 3
    other.close()


def test_a_damaged_row_is_dropped_and_the_rest_kept(tmp_path, caplog):
    path = tmp_path / "turns.sqlite"
    pipe = stored_pipeline(path)
    talk(pipe)
    other = Client("chatml", pipe)
    other.ask(Message("user", "Elsewhere"))
    other.answer(say("Yes."))
    pipe.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET blob = zeroblob(100) WHERE id = (SELECT MIN(id) FROM records)")
    again = stored_pipeline(path)
    assert len(again._turns) == 1 and "damaged" in caplog.text
    again._store.flush()
    again.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM records").fetchone() == (1,)


def test_a_file_that_is_no_database_is_set_aside(tmp_path, caplog):
    path = tmp_path / "turns.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    store = TurnDB(path)
    assert store.load("x").records == []
    store.close()
    assert (tmp_path / "turns.sqlite.damaged").exists() and "set aside" in caplog.text


def test_the_file_is_bounded(tmp_path):
    record = record_of(talk(pipeline("chatml")))
    store = TurnDB(tmp_path / "t.sqlite", limit_bytes=3 * len(encode(record)))
    store.load("f")
    for record_id in range(10):
        store.save_record(record_id, record, [])
    store.flush()
    assert [record_id for record_id, _ in store.load("f").records] == [7, 8, 9]
    store.close()


def test_healing_on_disk_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("start_llm.prompt.turndb.CAPACITY", 3)
    store = TurnDB(tmp_path / "t.sqlite")
    for number in range(9):
        store.save_healing(b"parent", bytes([number]), Healed("text", None, ("{}",)))
    store.flush()
    assert [key for _, key, _ in store.load("f").healing] == [b"\x06", b"\x07", b"\x08"]
    store.close()


WRITER = """
import sys
from pathlib import Path
from start_llm.prompt import turndb
from start_llm.prompt.turncodec import decode
turndb._GATHER_SECONDS = 0.0
store = turndb.TurnDB(Path(sys.argv[1]))
last = store.load("f").next_id
record = decode(Path(sys.argv[2]).read_bytes())
for number in range(last, last + 100000):
    store.save_record(number, record, [number - 5])
    if number == last + 20:
        store.flush()
        print("going", flush=True)
"""


def test_a_kill_in_the_middle_of_writing_damages_nothing(tmp_path):
    record = record_of(talk(pipeline("chatml")))
    (tmp_path / "record").write_bytes(encode(record))
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "t.sqlite"), str(tmp_path / "record")]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None and process.stdout.readline() == b"going\n"
            process.send_signal(signal.SIGKILL)
        store = TurnDB(tmp_path / "t.sqlite")
        stored = store.load("f")
        store.close()
        assert stored.records and all(found == record for _, found in stored.records)
