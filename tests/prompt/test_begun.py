"""A begun answer stands in the frame that the template gives to answers, and the next turn goes on from it."""

from __future__ import annotations

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.guard import CUT
from tests.prompt.client import pipeline, request
from tests.prompt.models import TEMPLATES, model

BEGUN, REST = "The file holds:", " one function, and no more than that."


@pytest.mark.parametrize("family", TEMPLATES)
def test_its_frame_is_that_of_an_answer(family: str) -> None:
    pipe, tokenizer = pipeline(family), model(family)[1]
    asked = [Message("user", "Say what stands in this file.")]
    prepared = pipe.prepare(request([*asked, Message("assistant", BEGUN)]), thinking=False)
    text = prepared.rendering.text.replace(CUT, "")
    if family == "harmony":
        assert text.endswith(f"<|start|>assistant<|channel|>final<|message|>{BEGUN}")
    end = min(tokenizer.eos_ids)
    generated = tokenizer.encode(REST)
    pipe.record(prepared, Message("assistant", REST), [*generated, end])
    talk = [*asked, Message("assistant", BEGUN + REST), Message("user", "And then?")]
    tokens = pipe.prepare(request(talk), thinking=False).prompt.tokens
    known = (*prepared.prompt.tokens, *generated)
    assert tokens[: len(known)] == known
