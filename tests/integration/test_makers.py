"""What a model's makers recommend holds for the requests that this model answers, whatever name they came by."""

from __future__ import annotations

import json
from pathlib import Path

from start_llm.models.generation_config import FILE
from tests.integration.live import Live, live
from tests.memory_folder import memory_folder
from tests.models.lora import build_adapter, build_base

SMALL = {"top_p": 0.95, "top_k": 20, "temperature": 0.6, "min_p": "none"}
LARGE = {"top_p": 0.8, "repetition_penalty": 1.05}


def furnish(folder: Path) -> Path:
    main, small = build_base(folder / "models" / "large"), build_base(folder / "models" / "small")
    for model, advice in ((main, LARGE), (small, SMALL)):
        (model / FILE).write_text(json.dumps(advice))
    build_adapter(folder / "adapters" / "titles", small)
    return main


def drawn(server: Live, **body: object) -> tuple[float, float, int, float, float]:
    """With what the model thread is asked to draw the answer to a request."""
    with server.submitted() as seen:
        server.chat([{"role": "user", "content": "Hello."}], max_tokens=2, **body)
    one = seen[0].sampling
    return one.temperature, one.top_p, one.top_k, one.min_p, one.repetition_penalty


def test_the_makers_of_the_model_that_answers_are_heard() -> None:
    """DEFAULT_TEMPERATURE is set here, so it wins over theirs; a request wins over all."""
    with memory_folder() as cache:
        main = furnish(cache)
        with live(main, cache, model_map="claude-haiku-*=small") as server:
            of_small = (0.0, 0.95, 20, 0.05, 1.0)
            assert drawn(server) == (0.0, 0.8, 40, 0.05, 1.05)
            assert drawn(server, temperature=0.7, repetition_penalty=1.0) == (0.7, 0.8, 40, 0.05, 1.0)
            assert drawn(server, model="small") == of_small
            assert drawn(server, model="claude-haiku-4-5") == of_small
            assert drawn(server, model="small+titles") == of_small
            assert drawn(server, model="small", top_p=0.5, top_k=0) == (0.0, 0.5, 0, 0.05, 1.0)
            cards = server.get("/v1/models").json()["data"]
            facts = {card["id"]: card["details"].get("facts") for card in cards}
            small = facts["small"]
            assert small["sampling.top_k"] == {"value": 20, "source": "makers"}
            assert small["sampling.temperature"] == {"value": 0.0, "source": "setting"}
            assert small["sampling.min_p"] == {"value": 0.05, "source": "built-in"}
