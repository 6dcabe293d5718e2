"""`/v1/completions` on a whole server: what was decoded, in its order, streamed and at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import Live

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
