"""Drafts through the whole server, on models whose KV tells what lies in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.live import Live, Start
from tests.kinds import some
from tests.model_thread import on_model_thread
from tests.oracle import expected_truth, script

pytestmark = pytest.mark.usefixtures("indexed", "cheap_passes")

LINES = "\n".join(f"    value_{i} = read('field {i}', {i * i})" for i in range(14))
FILE = f"def load(read):\n{LINES}\n    return locals()\n"
NAMED = {
    "type": "object",
    "properties": {"population_of_the_city": {"type": "integer"}, "name_of_the_country": {"type": "boolean"}},
    "required": ["population_of_the_city", "name_of_the_country"],
    "additionalProperties": False,
}
ANSWER = f"I change this part:\n{LINES}\nand nothing else."


@pytest.mark.parametrize("kind", some(["hybrid", "plain", "windowed"]))
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


def test_answers_at_the_same_time_are_drafted_together(servers: Callable[..., Live]) -> None:
    """In one pass over a block of each; what then lies in the KV is what was said."""
    server = servers("plain")
    first = {"role": "user", "content": FILE + script(ANSWER, "{truth}")}
    before = on_model_thread(server.app, lambda model, _: len(model.work.passes))
    answer = server.chat([first], session_id="together", n=2)
    assert [choice["message"]["content"] for choice in answer["body"]["choices"]] == [ANSWER, ANSWER]
    passes = on_model_thread(server.app, lambda model, _: model.work.passes[before:])
    assert sum(len(one.tokens) == 2 and min(one.tokens) > 4 for one in passes) > 3
    second = server.chat([first, answer["message"], {"role": "user", "content": "Go on."}], session_id="together")
    assert second["message"]["content"] == expected_truth(server.prompt_of(second))
    assert second["report"]["reused"] > second["report"]["prompt"] - 100


def test_one_request_or_the_server_can_do_without(servers: Callable[..., Live], start: Start) -> None:
    with start(drafts="off") as without:
        for server, more in ((servers("plain"), {"drafts": False}), (without, {})):
            answer = server.chat([{"role": "user", "content": FILE + script(ANSWER)}], **more)
            assert answer["message"]["content"] == ANSWER and answer["report"]["drafted"] == 0
    bad = servers("plain").post("/v1/chat/completions", json={"messages": [], "drafts": "perhaps"})
    assert bad.status_code == 400 and "drafts" in bad.json()["error"]["message"]


def test_a_stop_string_in_a_block_ends_the_answer_there(servers: Callable[..., Live]) -> None:
    stop = "value_9 = read('field 9'"
    asked = [{"role": "user", "content": FILE + script(ANSWER)}]
    answer, without = (servers("plain").chat(asked, stop=[stop], drafts=drafts) for drafts in (True, False))
    assert answer["message"]["content"] == without["message"]["content"] == ANSWER[: ANSWER.index(stop)]
    assert answer["body"]["usage"]["completion_tokens"] == without["body"]["usage"]["completion_tokens"]


def test_max_tokens_in_a_block(servers: Callable[..., Live]) -> None:
    for most in (40, 61, 90):
        answer = servers("hybrid").chat([{"role": "user", "content": FILE + script(ANSWER)}], max_tokens=most)
        assert answer["body"]["usage"]["completion_tokens"] == most
        assert ANSWER.startswith(answer["message"]["content"])
        assert answer["body"]["choices"][0]["finish_reason"] == "length"


def test_logprobs_and_a_grammar_in_a_block(servers: Callable[..., Live]) -> None:
    """Every token has its own logprob, and what a schema leaves no choice about is still said as without drafts."""
    ways = {
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NAMED}}},
    }
    for name, way in ways.items():
        asked = [{"role": "user", "content": FILE + script(ANSWER)}]
        with_drafts, without = (servers("plain").chat(asked, drafts=on, **way) for on in (True, False))
        assert with_drafts["report"]["accepted"] > 5, name
        assert with_drafts["report"]["forwards"] < without["report"]["forwards"], name
        assert with_drafts["body"]["choices"] == without["body"]["choices"], name
