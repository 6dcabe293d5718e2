"""The simulator of drafts counts what a server would do."""

from __future__ import annotations

import json
import os
import random
from itertools import islice
from pathlib import Path

import pytest

from scripts.bench import drafted
from scripts.bench.drafting import MACHINES, CallStyle, Fixed, Gated, Totals, Turn, replay, turns
from scripts.bench.virtual import VirtualClock
from tests.kinds import some
from tests.oracle import build_oracle, make_tokenizer
from tests.oracle.build import Kind

SESSIONS = Path(os.environ.get("START_LLM_SESSIONS") or Path(__file__).parents[3] / "shared" / "sessions")
RECORDED = SESSIONS / "pi-1.jsonl"


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def session(tmp_path: Path) -> Path:
    code = "\n".join(f'    value_{i} = read("field {i}", {i * i})' for i in range(12))
    call = {"type": "toolCall", "id": "1", "name": "edit"}
    call["arguments"] = {"path": "a.py", "oldText": code, "newText": "pass"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Empty it."}]},
        {"role": "assistant", "content": [{**call, "id": "0", "name": "read", "arguments": {"path": "a.py"}}]},
        {"role": "toolResult", "toolCallId": "0", "content": [{"type": "text", "text": code}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, call]},
        {"role": "assistant", "content": []},
        {"role": "toolResult", "toolCallId": "1", "content": [{"type": "text", "text": "Edited."}]},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Any time."}]},
    ]
    path = tmp_path / "session.jsonl"
    path.write_text("\n".join(json.dumps({"message": message}) for message in messages) + '\n{"type": "end"}\n')
    return path


def test_every_token_is_said_once_and_none_is_drafted_where_nothing_repeats() -> None:
    session = [Turn([1, 2, 3], list(range(10, 60)), [])]
    totals = replay(session, Fixed())
    assert (totals.said, totals.forwards, totals.drafted, totals.per_forward) == (50, 50, 0, 1.0)


def test_what_was_read_is_said_in_few_passes() -> None:
    totals = replay([Turn(list(range(100)), [*range(40, 80)], [])], Fixed())
    # Three tokens to know the place, three drafted with each pass until 16 are equal, then the rest at once.
    assert totals.said == 40 and totals.forwards == 2 + 4 + 1
    assert sum(width * count for width, count in totals.widths.items()) == totals.forwards + totals.drafted


def test_what_is_carried_makes_the_next_pass_wider_and_no_fewer_tokens_are_said() -> None:
    said = [*range(40, 48), 7, 8, *range(60, 70)]
    cut, carried = (replay([Turn(list(range(100)), said, [])], Fixed(), carry=carry) for carry in (False, True))
    assert (cut.said, cut.forwards, cut.accepted) == (carried.said, carried.forwards, carried.accepted)
    assert carried.speed_up(MACHINES["M1-like"]) < cut.speed_up(MACHINES["M1-like"])


def test_arguments_in_json_are_found_in_views_of_the_results(session: Path) -> None:
    as_json = list(turns(session, encode, "json"))
    assert replay(as_json, Fixed()).per_forward > 1.5 * replay(as_json, Fixed(), views=False).per_forward
    as_xml = list(turns(session, encode, "xml"))
    assert len(as_xml) == 3 and replay(as_xml, Fixed()).per_forward > 4


def test_the_gate_costs_a_few_passes_where_drafts_do_not_pay(session: Path) -> None:
    for costs in ({1: 1.0, 32: 32.0}, *MACHINES.values()):
        for carry in (False, True):
            totals = replay(list(turns(session, encode, "xml")), Gated(costs, carry), carry=carry)
            assert totals.speed_up(costs) >= 0.98  # of 700 tokens: one wide pass and a narrow one are a hundredth


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not RECORDED.is_file(), reason="no recorded session here")
@pytest.mark.parametrize("carry", [False, True])
def test_a_gate_that_learns_the_costs_is_about_as_good_as_one_that_knows_them(carry: bool) -> None:
    costs, tokenizer = {1: 0.0101, 64: 0.0164}, make_tokenizer()
    recorded = list(turns(RECORDED, lambda text: tokenizer.encode(text).ids, "xml"))
    learns, knows = (replay(recorded, Gated(costs, carry, noise), carry=carry) for noise in (0.1, None))
    assert learns.per_forward > 0.95 * knows.per_forward


def both(folder: Path, path: Path, style: CallStyle, kind: Kind, most: int | None = None) -> tuple[float, float, int]:
    """Tokens per pass of our server, and what the simulator says that they should be; tokens said."""
    costs, tokenizer = MACHINES["M4 Pro"], make_tokenizer()
    checkpoint = build_oracle(folder / "oracle", kind, template="xml" if style == "xml" else "plain")
    session = list(islice(turns(path, lambda text: tokenizer.encode(text).ids, style), most))
    with drafted.serving(checkpoint, folder, costs) as url:
        requests = list(islice(drafted.asked(path, style), most))
        _, found = drafted.replay(url, folder / "reply.txt", requests, drafted.tools_of(path))
    carry = kind == "hybrid"
    return found.per_forward, replay(session, Gated(costs, carry), carry=carry).per_forward, found.said


@pytest.mark.usefixtures("indexed")
@pytest.mark.parametrize(("style", "kind"), some([("json", "hybrid"), ("xml", "plain")]))
def test_the_server_does_what_the_simulator_says(tmp_path: Path, session: Path, style: CallStyle, kind: Kind) -> None:
    served, simulated, said = both(tmp_path, session, style, kind)
    assert said > 200 and served > 3 and served > 0.9 * simulated


def measured_by_the_gate(folder: Path, reply: str) -> Totals:
    """What an answer takes where a pass takes 10 ms x (1 + width / 100), and the gate goes by what it measures."""
    checkpoint = build_oracle(folder / "oracle", "plain", layers=["K"])
    with drafted.serving(checkpoint, folder, passes="0.01 0.0001 0 0", clock=VirtualClock()) as url:
        message = {"role": "assistant", "content": reply}
        asked = drafted.Asked([{"role": "user", "content": "go"}], reply, [], message)
        return drafted.replay(url, folder / "reply.txt", [asked], [])[1]


@pytest.mark.thorough
def test_text_that_never_repeats_is_not_slower_for_a_gate_that_measures(tmp_path: Path) -> None:
    chance = random.Random(2)
    text = " ".join("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(100))
    totals = measured_by_the_gate(tmp_path, text)
    took = 0.01 * totals.forwards + 0.0001 * (totals.forwards + totals.drafted)
    assert totals.said > 300 and took < 0.0101 * (totals.said + 1) / 0.99


@pytest.mark.thorough
def test_the_device_does_not_wait_for_launches_where_pairs_of_tokens_are_known_but_nothing_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_LOG", str(tmp_path / "log.jsonl"))
    chance = random.Random(2)
    front, *texts = (" ".join("".join(chance.choices("abcdefgh", k=4)) for _ in range(n)) for n in (800, 150, 150))
    checkpoint, clock = build_oracle(tmp_path / "oracle", "plain", layers=["K"]), VirtualClock(launching=0.004)
    with drafted.serving(checkpoint, tmp_path, passes="0.02 0.0002 0 0", clock=clock) as url:
        paces = [
            drafted.paced(url, tmp_path, tmp_path / "log.jsonl", front, text, drafts=drafts)
            for text, drafts in zip(texts, (False, True), strict=True)
        ]
    without, found = (one.seconds / one.tokens for one in paces)
    assert without == pytest.approx(0.0202, rel=0.05), "it launches a pass while the device computes the one before"
    assert found < without / 0.95


@pytest.mark.usefixtures("indexed")
@pytest.mark.thorough
def test_what_is_copied_is_drafted_by_a_gate_that_measures(tmp_path: Path) -> None:
    line = "def value(read, field, index): return read(field, index * index)\n"
    assert measured_by_the_gate(tmp_path, line * 20).per_forward > 5


@pytest.mark.usefixtures("indexed")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not RECORDED.is_file(), reason="no recorded session here")
@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("style", ["xml", "json"])
def test_the_server_does_with_a_recorded_session_what_the_simulator_says(
    tmp_path: Path, style: CallStyle, kind: Kind
) -> None:
    served, simulated, said = both(tmp_path, RECORDED, style, kind, 40)
    assert said > 10_000 and served > 0.95 * simulated
