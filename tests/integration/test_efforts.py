"""The effort in a prompt is one that the model's family was trained with."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from tests.integration.live import live
from tests.oracle import build_oracle


def test_each_effort_that_is_asked_for_becomes_one_that_the_family_knows(tmp_path: Path) -> None:
    folder = build_oracle(tmp_path / "gpt-oss")
    template = folder / "chat_template.jinja"
    template.write_text("Effort: {{ reasoning_effort or 'open' }}.\n" + template.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen = {}
    with live(folder, tmp_path / "cache", model_family="gpt-oss", model_probe="off") as server:
        for asked in ("minimal", "medium", "xhigh", "none", None):
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "reasoning_effort": asked}
            answer = server.post("/v1/chat/completions", json={"model": "default", **body})
            assert answer.status_code == 200, answer.text
            text = tokenizer.decode(server.prompts[answer.json()["id"]])
            seen[asked] = text.partition("Effort: ")[2].partition(".")[0]
    assert seen == {"minimal": "low", "medium": "medium", "xhigh": "high", "none": "low", None: "open"}
