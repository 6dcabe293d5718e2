"""Adapters by request: each answers as its fused checkpoint does, shares the base's weights, and keeps its own KV."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.models.device import LEAST_CACHE_BYTES, PREFILL_BYTES
from tests.integration.asking import user
from tests.integration.live import WAIT, Live, live
from tests.kinds import rounds
from tests.memory_folder import memory_folder
from tests.models.lora import FAULTS, build_adapter, build_base, fuse
from tests.together import together
from tests.waiting import until

NO_END = {"3": -100}
WORDS = "what is new in this folder " * 60


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases, two adapters of one and one of the other, and what mlx-lm fuses of the first's."""
    top = tmp_path_factory.mktemp("zoo")
    base = build_base(top / "tiny-base")
    for seed, name in enumerate(("first", "second"), 1):
        build_adapter(top / "adapters" / name, base, seed=seed)
        fuse(top / f"fused-{name}", base, top / "adapters" / name)
    build_adapter(top / "adapters" / "wide", build_base(top / "other-base", width=48))
    return top


def furnish(zoo: Path, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    shutil.copytree(zoo / "adapters", cache / "adapters", ignore=shutil.ignore_patterns("first"))
    (cache / "adapters" / "first").symlink_to(zoo / "adapters" / "first")  # ADAPTER_PATH may name it, too
    for name in ("fused-first", "fused-second", "other-base"):
        (cache / "models" / name).symlink_to(zoo / name)


@pytest.fixture
def serve(zoo: Path) -> Iterator[Callable[..., Any]]:
    with memory_folder() as cache:
        furnish(zoo, cache)
        yield lambda **settings: live(zoo / "tiny-base", cache, **({"kv_disk_dir": "auto"} | settings))


@pytest.fixture(scope="module")
def server(zoo: Path) -> Iterator[Live]:
    with memory_folder() as cache:
        furnish(zoo, cache)
        with live(zoo / "tiny-base", cache, model_map="small-*=tiny-base+first", kv_disk_dir="auto") as running:
            yield running


def ask(server: Live, model: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return server.chat(messages, model=model, **({"max_tokens": 16, "temperature": 0, "logit_bias": NO_END} | more))


def said(answer: dict[str, Any]) -> tuple[Any, Any]:
    return answer["message"].get("content"), answer["message"].get("reasoning_content")


def cards(server: Live) -> dict[str, dict[str, Any]]:
    data = server.get("/v1/models").json()["data"]
    return {card["id"]: card["details"] for card in data}


def error(server: Live, **body: Any) -> tuple[int, str]:
    body = {"messages": [user("x")], "max_tokens": 2} | body
    response = server.post("/v1/chat/completions", json=body)
    return response.status_code, response.json()["error"]["message"] if response.status_code != 200 else ""


PAIRS = {"tiny-base+first": "fused-first", "tiny-base+second": "fused-second"}


def test_one_conversation_under_several_adapters_is_each_one_s_own(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked in turn, each time with the whole conversation; answers of one stand in the history of all."""
    read: set[str] = set()
    monkeypatch.setattr("start_llm.engine.assembly.read_ahead", lambda folder, *_: read.add(folder.name))
    with serve() as server:
        talk = [user(WORDS)]
        for turn, speaker in enumerate(("tiny-base", "tiny-base+first", "fused-second")[: rounds(3, 2)]):
            answers = {name: ask(server, name, talk) for name in ("tiny-base", *PAIRS, *PAIRS.values())}
            for adapted, fused in PAIRS.items():
                assert said(answers[adapted]) == said(answers[fused]), (turn, adapted)
                assert server.prompt_of(answers[adapted]) == server.prompt_of(answers[fused]), (turn, adapted)
            assert len({said(answers[name]) for name in ("tiny-base", *PAIRS)}) == 3
            for name, answer in answers.items():
                report = answer["report"]
                if turn == 0:
                    assert report["reused"] == 0, (name, "nobody's KV but its own")
                else:
                    assert report["computed"] <= 1.1 * report["new"] + 8, (turn, name, report)
            talk += [
                {"role": "assistant", "content": answers[speaker]["message"]["content"] or ""},
                user(f"and what else, number {turn}? {'more words ' * 20}"),
            ]
        assert read == set(PAIRS.values()), "the base's weights are read once"
        shown = cards(server)
        assert 0 < shown["tiny-base+first"]["weight_bytes"] < shown["tiny-base"]["weight_bytes"] / 8
        assert shown["tiny-base+first"]["base"] == "tiny-base" and shown["tiny-base+first"]["adapter"] == "first"


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({"model": "tiny-base+first"}, "tiny-base+first"),
        ({"adapter": "first"}, "tiny-base+first"),
        ({"model": "default", "extra_body": {"adapter": "first"}}, "tiny-base+first"),
        ({"model": "small-fast"}, "tiny-base+first"),
        ({"model": "tiny-base", "adapter": None}, "tiny-base"),
        ({"model": "other-base", "adapter": "wide"}, "other-base+wide"),
    ],
)
def test_which_model_and_adapter_is_meant(server: Live, body: dict[str, Any], meant: str) -> None:
    answer = server.post("/v1/chat/completions", json={"messages": [user("x")], "max_tokens": 2} | body)
    assert answer.json()["model"] == meant


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"adapter": "third"}, 404, "adapter='third': there is no such adapter; for 'tiny-base' there are 'fi"),
        ({"model": "tiny-base+third"}, 404, "there is no such adapter"),
        ({"model": "nobody+first"}, 404, "this server serves 'tiny-base', "),
        ({"model": "other-base+first"}, 400, "was trained on"),
        ({"adapter": "wide"}, 400, "was trained on other-base, not on tiny-base. If that is the same model, w"),
        ({"model": "tiny-base+first", "adapter": "second"}, 400, "which has one already"),
        ({"model": "small-fast", "adapter": "second"}, 400, "'small-fast' means 'tiny-base+first', which has one"),
        ({"adapter": ""}, 400, "the name of an adapter"),
        ({"adapter": 5}, 400, "the name of an adapter"),
        ({"adapter": ["first"]}, 400, "the name of an adapter"),
        ({"adapter": "../adapters/first"}, 400, "is no adapter's name"),
        ({"model": "tiny-base+../first"}, 400, "is no adapter's name"),
        ({"adapter": "."}, 400, "is no adapter's name"),
        ({"adapter": "first\x00"}, 400, "is no adapter's name"),
        ({"adapter": "/etc"}, 400, "is no adapter's name"),
        ({"adapter": "x" * 101}, 400, "at most 100 characters of `adapter` are allowed"),
        ({"model": "tiny-base+"}, 400, "is no adapter's name"),
    ],
)
def test_a_name_that_means_no_adapter_is_told(server: Live, body: dict[str, Any], status: int, sentence: str) -> None:
    before = cards(server)
    got, told = error(server, **body)
    assert (got, sentence in told) == (status, True), (got, told)
    counted = {"model": "default", "messages": [user("x")]} | body
    assert server.post("/v1/messages/count_tokens", json=counted).status_code == status
    assert len(told) < 600 and str(server.app.settings.cache_dir) not in told
    assert cards(server).keys() == before.keys()


def test_each_faulty_adapter_is_refused_with_a_sentence_and_harms_nobody(serve: Any, zoo: Path) -> None:
    with serve() as server:
        folder = server.app.settings.cache_dir / "adapters"
        right = said(ask(server, "tiny-base+first", [user(WORDS)]))
        for number, (_, spoil, _) in enumerate(FAULTS):
            shutil.copytree(zoo / "adapters" / "first", folder / f"broken-{number}")
            spoil(folder / f"broken-{number}")
        shaped = shutil.copytree(zoo / "adapters" / "wide", folder / "shaped")
        config = (shaped / "adapter_config.json").read_text()
        (shaped / "adapter_config.json").write_text(config.replace("other-base", "tiny-base"))
        for number, (what, _, _) in enumerate(FAULTS):
            status, told = error(server, adapter=f"broken-{number}")
            assert (status, f"broken-{number}" in told) == (400, True), (what, status, told)
            assert str(folder) not in told and str(zoo) not in told, what
        status, told = error(server, adapter="shaped")
        assert status == 400 and "The adapter shaped does not fit tiny-base" in told and "is needed" in told
        status, told = error(server, adapter="shaped", stream=True)
        assert status == 400 and "is tried again in" in told
        assert said(ask(server, "tiny-base+first", [user(WORDS)])) == right
        assert cards(server)["tiny-base"]["state"] == "ready"
        assert not any(name for name, card in cards(server).items() if "broken" in name and card["state"] == "ready")


@pytest.mark.thorough
def test_an_adapter_that_is_changed_is_served_as_it_is_now(serve: Any, zoo: Path) -> None:
    with serve() as server:
        folder = server.app.settings.cache_dir / "adapters"
        talk = [user(WORDS)]
        expected = {name: said(ask(server, name, talk)) for name in PAIRS}
        shutil.copytree(zoo / "adapters" / "first", folder / "mine")
        (folder / "mine" / "adapter_config.json").write_text("{")
        assert error(server, adapter="mine")[0] == 400
        for name in ("first", "second"):
            # A client has its answer before the server has let go of the model; one in use stays as it is.
            until(lambda: not any(entry.users for entry in server.app.pool._registry.entries()))
            shutil.copytree(zoo / "adapters" / name, folder / "mine", dirs_exist_ok=True)
            answer = ask(server, "tiny-base+mine", talk)
            assert said(answer) == expected[f"tiny-base+{name}"], "at once, and nothing of the other one's KV"
        shutil.rmtree(folder / "mine")
        assert error(server, adapter="mine")[0] == 404


@pytest.mark.thorough
def test_requests_at_the_same_time_do_not_mix(serve: Any) -> None:
    """Rows are decoded together within an adapter only: a wrong one would answer as another does."""
    names = ("tiny-base", *PAIRS)
    with serve(drafts="off") as server:

        def one(name: str, text: str) -> tuple[Any, Any]:
            return said(ask(server, name, [user(text)], max_tokens=48))

        prompts = [f"{number} {WORDS}" for number in range(2)]
        alone = {(name, text): one(name, text) for name in names for text in prompts}
        asked = [(name, text) for text in prompts for name in names]
        found = together(partial(one, name, text) for name, text in asked)
        assert dict(zip(asked, found, strict=True)) == alone


@pytest.mark.thorough
def test_the_base_may_go_while_its_adapters_stay_and_its_weights_are_counted_as_long(serve: Any) -> None:
    def weights(server: Live) -> int:
        """Bytes of memory that all weights take, by the pool's account."""
        return int(server.app.pool.figures()["models_weight_bytes"])

    def unload(name: str) -> httpx.Response:
        return server.post("/v1/models/unload", json={"model": name})

    with serve(pool_memory_bytes=8 * 2**30) as server:
        talk = [user(WORDS)]
        right = {name: said(ask(server, name, talk)) for name in ("tiny-base", "tiny-base+first")}
        sizes = {name: card["weight_bytes"] for name, card in cards(server).items()}
        both = sizes["tiny-base"] + sizes["tiny-base+first"]
        assert weights(server) == both
        assert unload("tiny-base").json()["details"]["state"] == "stored"
        assert weights(server) == both, "the adapter computes with them"
        assert said(ask(server, "tiny-base+first", talk)) == right["tiny-base+first"]
        assert said(ask(server, "tiny-base", talk)) == right["tiny-base"]
        assert weights(server) == both
        assert unload("tiny-base+first").json()["details"]["state"] == "stored"
        assert weights(server) == sizes["tiny-base"]
        assert unload("tiny-base").status_code == 200 and weights(server) == 0


@pytest.mark.thorough
def test_a_swap_in_a_tight_budget_keeps_the_weights_and_each_one_s_conversation(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("start_llm.engine.assembly.read_ahead", lambda *_: pytest.fail("the weights are read again"))
    with serve(pool_memory_bytes=PREFILL_BYTES + LEAST_CACHE_BYTES + 64 * 2**20) as server:
        talk = [user(WORDS)]
        first = {name: ask(server, name, talk) for name in ("tiny-base+first", "tiny-base+second")}
        for name in first:
            again = ask(server, name, talk)
            ready = [other for other, card in cards(server).items() if card["state"] == "ready"]
            assert ready == [name]
            assert said(again) == said(first[name]) and again["report"]["computed"] < 16, (name, again["report"])


def trained(smol_path: Path, folder: Path) -> tuple[Path, Path]:
    """An adapter of SmolLM2 by mlx-lm's own trainer, and the checkpoint that its `fuse` makes of both."""
    data = folder / "data"
    data.mkdir()
    said = [user("What is the capital of France?"), {"role": "assistant", "content": "Arr! Paris!"}]
    for part in ("train", "valid"):
        (data / f"{part}.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    adapter, fused = folder / "adapters" / "pirate", folder / "models" / "fused-pirate"
    lora = ["--train", "--data", str(data), "--iters", "6", "--batch-size", "1", "--num-layers", "4"]
    lora += ["--val-batches", "0", "--learning-rate", "1e-3", "--max-seq-length", "128", "--steps-per-eval", "1000"]
    for command in (["lora", *lora], ["fuse", "--save-path", str(fused)]):
        mlx_lm = [sys.executable, "-m", "mlx_lm", *command, "--model", str(smol_path), "--adapter-path", str(adapter)]
        done = subprocess.run(mlx_lm, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return adapter, fused


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_smollm2_with_an_adapter_says_what_the_fused_checkpoint_says(smol_path: Path, tmp_path: Path) -> None:
    trained(smol_path, tmp_path)
    name = "SmolLM2-135M-Instruct-f32-v1"
    prompts = ["What is the capital of France?", "Write a haiku about the sea.", "Name three colours."]
    with live(smol_path, tmp_path, served_model_name=name) as server:
        differ = 0
        for prompt in prompts:
            tokens = {}
            for model in (name, f"{name}+pirate", "fused-pirate"):
                body = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0, "logprobs": 0}
                body |= {"logit_bias": {"0": -100, "1": -100, "2": -100}}
                answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=5 * WAIT).json()
                tokens[model] = answer["choices"][0]["logprobs"]["tokens"]
            assert tokens[f"{name}+pirate"] == tokens["fused-pirate"], prompt
            assert len(tokens["fused-pirate"]) == 48
            differ += tokens[name] != tokens["fused-pirate"]
        assert differ, "the adapter does something"
        shown = cards(server)
        print({model: shown[model]["weight_bytes"] for model in (name, f"{name}+pirate")})
        assert shown[f"{name}+pirate"]["weight_bytes"] < shown[name]["weight_bytes"] / 50
