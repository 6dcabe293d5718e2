"""The oracle tells the truth, and says so when its cache lies."""

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from tests.kinds import some
from tests.oracle import LAYERS, MISMATCH, Oracle, build_oracle, expected_truth, mark, work_done

THOUGHT = "<think>\nhm\n</think>\n\nSee.\n<tool_call>\n"
CALL = THOUGHT + '{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'


@pytest.fixture(scope="module", params=some(sorted(LAYERS)))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.load(build_oracle(tmp_path_factory.mktemp(request.param), request.param))


def text(oracle: Oracle, tokens: list[int]) -> str:
    return str(oracle.tokenizer.decode(tokens))


def batch(oracle: Oracle, prompts: list[list[int]], step: int = 64, **kwargs) -> tuple[list[list[int]], list[list]]:
    """Answers (without end tokens) and final caches of prompts that run in one `BatchGenerator`."""
    generator = BatchGenerator(oracle.model, stop_tokens=[[3]], max_tokens=2000, prefill_step_size=step)
    uids = generator.insert([list(p) for p in prompts], **kwargs)
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    caches: dict[int, list] = {}
    while len(caches) < len(uids):
        for response in generator.next()[1]:
            if response.token != 3:
                answers[response.uid].append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    return [answers[uid] for uid in uids], [caches[uid] for uid in uids]


def test_truth_is_the_hash_of_the_prompt(oracle: Oracle) -> None:
    prompt = oracle.prompt("some words " * 300 + "[[truth]]")
    assert text(oracle, oracle.generate(prompt, chunk=100)) == expected_truth(prompt)
    assert expected_truth(prompt) != expected_truth(oracle.prompt("[[truth]]"))


def test_work_is_counted_apart_from_decoding(oracle: Oracle) -> None:
    prompt = oracle.prompt("some words " * 100)
    oracle.model.work.reset()
    answer = oracle.generate(prompt)
    assert oracle.model.work.computed == len(prompt)
    assert oracle.model.work.decoded >= len(answer)


def test_ragged_batches_answer_as_single_rows(oracle: Oracle) -> None:
    prompts = [oracle.prompt("x" * n + " [[truth]] [[long 30]]") for n in (1, 700, 33, 210, 1500)]
    answers, caches = batch(oracle, prompts)
    assert answers == [oracle.generate(p) for p in prompts]
    follow_ups = [
        [*p, *a, 3, *oracle.tokenizer.encode("\n"), *oracle.prompt("And? [[truth]]")]
        for p, a in zip(prompts, answers, strict=True)
    ]
    rest = [full[len(p) + len(a) + 1 :] for full, p, a in zip(follow_ups, prompts, answers, strict=True)]
    oracle.model.work.reset()
    second, _ = batch(oracle, rest, caches=caches)
    assert [text(oracle, a) for a in second] == [expected_truth(full) for full in follow_ups]
    assert oracle.model.work.computed == sum(map(len, rest))


def test_a_cut_that_leaves_a_wrong_state_is_told(oracle: Oracle) -> None:
    """Attention layers alone may be trimmed; states and wrapped windows may not."""
    prompt = oracle.prompt("some words " * 200)
    cache = oracle.model.make_cache()
    oracle.generate(prompt, cache)
    keep = 100
    for kind, layer in zip(oracle.model.args.layer_kinds, cache, strict=True):
        if kind != "A":
            layer.trim(layer.offset - keep)
    rest = oracle.prompt("What? [[truth]]")
    answer = text(oracle, oracle.generate(rest, cache))
    if set(oracle.model.args.layer_kinds) == {"K"}:
        assert answer == expected_truth(prompt[:keep] + rest)
    else:
        assert answer.startswith(MISMATCH)


def test_a_wrong_position_is_told(oracle: Oracle) -> None:
    prompt = oracle.prompt("some words")
    cache = oracle.model.make_cache()
    oracle.generate(prompt, cache)
    for layer in cache:
        if hasattr(layer, "values"):
            layer.values = layer.values + 1
    answer = text(oracle, oracle.generate(oracle.prompt("[[truth]]"), cache))
    assert answer.startswith(MISMATCH) and "positions" in answer


def test_another_layers_tokens_are_told(oracle: Oracle) -> None:
    prompt = oracle.prompt("some words")
    first, second = oracle.model.make_cache(), oracle.model.make_cache()
    oracle.generate(prompt, first, limit=1)
    oracle.generate(list(reversed(prompt)), second, limit=1)
    mixed = [*first[:-1], second[-1]]
    assert text(oracle, oracle.generate(oracle.prompt("[[truth]]"), mixed)).startswith(MISMATCH)


def test_a_state_that_missed_a_token_is_told(tmp_path: Path) -> None:
    oracle = Oracle.load(build_oracle(tmp_path, "hybrid"))
    prompt = oracle.prompt("some words [[truth]]")
    early = oracle.model.make_cache()
    oracle.model(mx.array([prompt[:5]]), cache=early)
    late = copy.deepcopy(early)
    oracle.model(mx.array([prompt[5:-3]]), cache=late)
    stale = [early[0], late[1], late[2], late[3]]
    assert text(oracle, oracle.generate(prompt[-3:], stale)).startswith(MISMATCH + "layer 0")


def test_the_log_counts_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle.load(build_oracle(tmp_path, "hybrid"))
    log = tmp_path / "work.jsonl"
    monkeypatch.setenv("ORACLE_LOG", str(log))
    prompt = oracle.prompt("some words " * 50)
    oracle.generate(prompt)
    before = mark(log)
    assert work_done(log) == len(prompt)
    oracle.generate(oracle.prompt("b"))
    assert work_done(log, before) == len(oracle.prompt("b"))
    assert work_done(log, 0, before) == len(prompt)
