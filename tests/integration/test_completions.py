"""`/v1/completions` on a whole server: what was decoded, in its order, streamed and at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.chat import stream
from start_llm.core.events import Sampled
from start_llm.models.background import on_thread
from start_llm.parsing.choice import ChoiceParser
from tests.integration.live import ENDLESS, WAIT, Live, Start
from tests.oracle import make_tokenizer
from tests.unique import unique
from tests.vendors import openai
from tests.waiting import until

PROMPT = "<|im_start|>user\nOnce<|im_end|>\n<|im_start|>assistant\n"
REPLY = ' there <|eot_id|>user\nwas <think>\nwhy\n</think>\n\n a 😀 <tool_call>{"name": "x"}</tool_call> of é. \n'


def asked(server: Live, **more: Any) -> dict[str, Any]:
    """Text and logprobs of the choice, and why it ended."""
    made = server.openai.completions.create(model="default", prompt=PROMPT, logprobs=1, temperature=0, **more)
    text, why, told = "", None, {"tokens": [], "text_offset": [], "token_logprobs": []}  # type: ignore[var-annotated]
    for chunk in made if more.get("stream") else [made]:
        for choice in chunk.choices:
            text, why = text + choice.text, choice.finish_reason or why
            for name in told if choice.logprobs is not None else ():
                told[name] += getattr(choice.logprobs, name)
    return {"text": text, "why": why, **told}


@pytest.mark.parametrize("stop", [None, "of", " é. "])
def test_an_answer_is_raw_and_the_same_streamed(
    servers: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str | None
) -> None:
    server, reply = servers("plain"), tmp_path / "reply.txt"
    reply.write_text(REPLY)
    monkeypatch.setenv("ORACLE_REPLIES", str(reply))
    whole = asked(server, stop=stop)
    assert whole["text"] == REPLY.partition(stop or "\0")[0]
    assert whole["why"] == "stop"
    assert asked(server, stop=stop, stream=True) == whole
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert whole["text"][offset : offset + len(token)] == token
    assert "".join(whole["tokens"]) == whole["text"]


# --- several prompts in one request ---


def prompt(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def ordered(made: Any, stream: bool) -> tuple[list[str], Any, list[int]]:
    """Text of each choice, the usage, and the choices in the order in which they ended."""
    texts: dict[int, str] = {}
    usage, ended = None, []
    for chunk in made if stream else [made]:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ended += [choice.index] if choice.finish_reason else []
    return [texts[index] for index in range(len(texts))], usage, ended


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_as_if_each_were_alone(servers: Callable[..., Live], stream: bool) -> None:
    server, words = servers("plain"), unique()
    prompts: list[Any] = [prompt(f"{words} {i} [[truth]]") for i in range(3)]
    asked = {"model": "default", "n": 2, "temperature": 0, "stream": stream, "stream_options": {"include_usage": True}}
    texts, usage, ended = ordered(server.openai.completions.create(prompt=prompts, **asked), stream)
    alone = [ordered(server.openai.completions.create(prompt=one, **asked), stream) for one in prompts]
    assert texts == [text for one in alone for text in one[0]] and len(set(texts)) == 3
    assert sorted(ended) == list(range(6))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(usage, name) == sum(getattr(one[1], name) for one in alone)
    by_ids = [make_tokenizer().encode(one, add_special_tokens=False).ids for one in prompts]
    assert ordered(server.openai.completions.create(prompt=by_ids, **asked), stream)[0] == texts


def test_a_short_answer_does_not_wait_for_a_long_one(servers: Callable[..., Live]) -> None:
    """Its stop string is seen while the other goes on: nothing is generated behind it."""
    server = servers("plain")
    made = server.openai.completions.create(
        model="default", prompt=[prompt("[[long 400]]"), prompt("[[script]]one two. END[[end]][[long 400]]")],
        stop="two", temperature=0, stream=True, max_tokens=400, extra_body=ENDLESS,
    )  # fmt: skip
    texts, _, ended = ordered(made, True)
    assert ended == [1, 0] and texts[1] == "one " and len(texts[0].split()) > 300


def test_the_report_is_of_all_prompts(servers: Callable[..., Live]) -> None:
    server, words = servers("plain"), unique()
    body = {"model": "default", "prompt": [prompt(f"{words} {i}" * 50) for i in range(3)], "max_tokens": 3}
    planned = server.post("/v1/cache/explain", json=body).json()
    answer = server.post("/v1/completions", json=body)
    usage, told = answer.json()["usage"], server.get(f"/v1/cache/requests/{answer.json()['id']}").json()
    assert planned["prompt"] == told["prompt"] == usage["prompt_tokens"] == usage["start_llm"]["prompt"]
    assert planned["new"] == told["new"] == usage["start_llm"]["new"] > 300
    assert told["generated"] == usage["completion_tokens"] == 9 and told["forwards"] >= 6
    streamed = server.post("/v1/completions", json=body | {"stream": True}).headers.get("x-start-llm-cache")
    assert streamed is None or streamed.startswith(f"prompt={told['prompt']};"), "of all, if all are planned in time"


def test_seeds_are_counted_within_a_prompt(servers: Callable[..., Live]) -> None:
    with servers("plain").submitted() as works:
        servers("plain").openai.completions.create(model="default", prompt=["a", "b"], n=2, seed=7, max_tokens=1)
    seeds = {work.id.rpartition("#")[2]: work.sampling.seed for work in works}
    assert seeds == {"0": 7, "1": 8, "2": 7, "3": 8}


def test_one_wrong_prompt_is_named_and_none_is_answered(start: Start) -> None:
    good, far = prompt("word " * 100), prompt("word " * 3000)
    with start(max_kv_size=2048, max_concurrency=1, max_queue=3) as server:
        create, before = server.openai.completions.create, server.work()
        for wrong in ([good, far], [[5], [10**6]], [good, good, ""]):
            with pytest.raises(openai.BadRequestError) as caught:
                create(model="default", prompt=wrong, stream=True)
            place = f"prompt[{len(wrong) - 1}]"
            assert caught.value.body["param"] == place and caught.value.body["message"].startswith(f"{place}: ")
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="default", prompt=[good, good], logit_bias={"1000000": 1})
        assert caught.value.body["param"] == "logit_bias" and caught.value.body["message"].startswith("logit_bias ")
        for wrong in ([10**6], [[1, 10**6]]):
            with pytest.raises(openai.BadRequestError, match="1000000") as caught:
                create(model="default", prompt=wrong)
            assert caught.value.body["param"] == "prompt"
        assert server.work() == before
        with pytest.raises(openai.RateLimitError):
            create(model="default", prompt=[good] * 5)
        until(lambda: server.app.engine.status().running + server.app.engine.status().queued == 0)
        report = create(model="default", prompt=good, max_tokens=1).usage.start_llm
        assert report["computed"] <= report["new"] + 16, "what was refused is no earlier request"


def test_a_client_that_leaves_ends_all_prompts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.01")
    with start(max_concurrency=3) as server:
        prompts = [prompt(f"{i} [[long 100000]]") for i in range(5)]
        body = {"model": "default", "prompt": prompts, "stream": True, **ENDLESS}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT) as answer:
            assert '"text"' in next(line for line in answer.iter_lines() if line.startswith("data: "))
            status = server.app.engine.status
            assert (status().running, status().queued) == (3, 2)
        until(lambda: status().running + status().queued == 0)
        (row,) = until(lambda: server.get("/v1/cache/requests").json()["requests"])
        assert row["status"] == 499 and 0 < row["generated"] < 100000
        assert server.openai.completions.create(model="default", prompt=["a"] * 3, max_tokens=1).choices[2].index == 2


def test_threads_that_cannot_be_started_leave_nothing_at_work(
    servers: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, started = servers("plain"), list[str]()

    def few(function: Callable[[], None], name: str) -> Any:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(name)
        return on_thread(function, name)

    monkeypatch.setattr(stream, "on_thread", few)
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.01")
    with pytest.raises(openai.InternalServerError):
        server.openai.completions.create(model="default", prompt=[prompt("[[long 100000]]")] * 3, extra_body=ENDLESS)
    status = server.app.engine.status
    until(lambda: status().running + status().queued == 0)


def test_a_fault_in_one_prompt_ends_the_others(servers: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    server, sampled = servers("plain"), stream.ChatStream._sampled

    def faulty(self: stream.ChatStream, choice: ChoiceParser, event: Sampled) -> None:
        if choice.index == 1:
            raise ZeroDivisionError
        sampled(self, choice, event)

    monkeypatch.setattr(stream.ChatStream, "_sampled", faulty)
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.01")
    with pytest.raises(openai.InternalServerError):
        server.openai.completions.create(model="default", prompt=[prompt("[[long 100000]]")] * 2, extra_body=ENDLESS)


def test_64_prompts_fit_a_server_as_it_comes(servers: Callable[..., Live]) -> None:
    server = servers("plain")
    made = server.openai.completions.create(model="default", prompt=[[5, i] for i in range(64)], max_tokens=1)
    assert [choice.index for choice in made.choices] == list(range(64)) and made.usage.prompt_tokens == 128
