"""Drafts through the whole server, on models whose KV tells what lies in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.live import WAIT, Live, live
from tests.oracle import expected_truth, script

LINES = "\n".join(f"    value_{i} = read('field {i}', {i * i})" for i in range(14))
FILE = f"def load(read):\n{LINES}\n    return locals()\n"
ANSWER = f"I change this part:\n{LINES}\nand nothing else."


@pytest.mark.parametrize("kind", ["plain", "hybrid", "windowed"])
def test_what_is_copied_takes_few_passes_and_the_kv_is_that_of_what_was_said(
    servers: Callable[..., Live], kind: str
) -> None:
    server = servers(kind)
    first = {"role": "user", "content": FILE + script(ANSWER, "{truth}")}
    answer = server.chat([first], session_id="drafts")
    report = answer["report"]
    assert answer["message"]["content"] == ANSWER
    assert report["accepted"] > 100 and report["drafted"] >= report["accepted"]
    assert report["forwards"] < report["generated"] / 2
    second = server.chat([first, answer["message"], {"role": "user", "content": "Go on."}], session_id="drafts")
    assert second["message"]["content"] == expected_truth(server.prompt_of(second))
    assert second["report"]["reused"] >= report["prompt"] + report["generated"]


def test_one_request_can_do_without(servers: Callable[..., Live]) -> None:
    server = servers("plain")
    answer = server.chat([{"role": "user", "content": FILE + script(ANSWER)}], drafts=False)
    assert answer["message"]["content"] == ANSWER
    assert answer["report"]["drafted"] == 0
    bad = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [], "drafts": "perhaps"}, timeout=WAIT)
    assert bad.status_code == 400 and "drafts" in bad.json()["error"]["message"]


def test_the_server_can_do_without(oracle_path: Callable[..., Path], tmp_path: Path) -> None:
    with live(oracle_path("plain"), tmp_path, drafts="off") as server:
        answer = server.chat([{"role": "user", "content": FILE + script(ANSWER)}])
    assert answer["message"]["content"] == ANSWER
    assert answer["report"]["drafted"] == 0


def test_a_stop_string_in_a_block_ends_the_answer_there(servers: Callable[..., Live]) -> None:
    answer = servers("plain").chat(
        [{"role": "user", "content": FILE + script(ANSWER)}], stop=["value_9 = read('field 9'"], session_id="stops"
    )
    assert answer["message"]["content"] == ANSWER[: ANSWER.index("value_9 = read('field 9'")]
    usage = answer["body"]["usage"]
    without = servers("plain").chat(
        [{"role": "user", "content": FILE + script(ANSWER)}], stop=["value_9 = read('field 9'"], drafts=False
    )
    assert usage["completion_tokens"] == without["body"]["usage"]["completion_tokens"]


def test_max_tokens_in_a_block(servers: Callable[..., Live]) -> None:
    for most in (40, 61, 90):
        answer = servers("hybrid").chat([{"role": "user", "content": FILE + script(ANSWER)}], max_tokens=most)
        assert answer["body"]["usage"]["completion_tokens"] == most
        assert ANSWER.startswith(answer["message"]["content"])
        assert answer["body"]["choices"][0]["finish_reason"] == "length"
