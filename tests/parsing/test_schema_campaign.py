"""20,000 generated schemas (`--slow`; some hundred by default): refused by name, or followed to a valid answer."""

from __future__ import annotations

import gc
import json
import random
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import psutil
import pytest
from jsonschema import Draft202012Validator, validators
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Tool
from start_llm.core.request import ResponseFormat, ToolChoice
from start_llm.engine.decode.constraint import Grammars
from tests.engine.tiny import make_tokenizer
from tests.kinds import some
from tests.parsing.schemas import schema
from tests.parsing.vocabulary import BYTES, constraint

FEW, MANY = 300, 20_000
PARTS = 10
STEPS = 120
SECONDS = 20.0
"""Of a processor, for one schema: the server gives up earlier (`engine.patience`)."""
FORMATS = ("hermes_json", "qwen3_coder", "glm47", "llama", "mistral")
GRAMMARS = Grammars(make_tokenizer(), [0])
KEPT_TO = validators.extend(Draft202012Validator, {"multipleOf": lambda *_: ()})
"""What else a schema says of an answer; of multiples of 0.1 floats are no judge."""


def follow(matcher: LLMatcher, chance: random.Random) -> str | None:
    """A random answer, if it comes to its end: any token that the mask allows may come, white space last."""
    vocabulary = GRAMMARS.make_vocabulary()
    mask, said = allocate_token_bitmask(1, vocabulary.vocab_size), list[int]()
    for _ in range(STEPS):
        if matcher.is_stopped():
            break
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: vocabulary.vocab_size])
        assert not matcher.is_error(), matcher.get_error()
        assert len(allowed) or matcher.is_accepting()
        if not len(allowed):
            break
        for _ in range(5):
            token = int(chance.choice(allowed))
            if not bytes(vocabulary.decode_bytes([token])).isspace():
                break
        assert matcher.consume_token(token), matcher.get_error()
        said += [token] if token else []
    else:
        return None
    return str(bytes(vocabulary.decode_bytes(said)).decode())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", some(range(PARTS)))
def test_each_schema_is_refused_or_can_be_followed(part: int, request: pytest.FixtureRequest) -> None:
    count = (MANY if request.config.getoption("--slow") else FEW) // PARTS
    outcomes: Counter[str] = Counter()
    gc.collect()
    before = psutil.Process().memory_info().rss
    for number in range(part * count, (part + 1) * count):
        chance = random.Random(f"schema {number}")
        asked, form = schema(chance), chance.choice(FORMATS)
        fields = {"response_format": ResponseFormat("json_schema", asked, "response_format.json_schema.schema")}
        if chance.random() < 0.4 and isinstance(asked, dict):
            fields = {"tools": (Tool("f", "", asked, strict=True),)}
        begun = time.process_time()
        try:
            if isinstance(asked, dict) and not number % 4:  # nobody asks that arguments be held to it
                loose = {"tools": (Tool("f", "", asked),), "tool_choice": ToolChoice("required")}
                assert constraint(BYTES, form, **loose) is not None
            made = constraint(BYTES, form, **fields)
            assert made is not None
            matcher = GRAMMARS.prepare(made).compiled
            answer = follow(matcher, chance)
            outcomes["went on" if answer is None else "complete"] += 1
            if answer is not None and "response_format" in fields:
                with suppress(RecursionError):  # of a ring of references
                    assert KEPT_TO(asked).is_valid(json.loads(answer)), answer
        except BadRequest as refused:
            assert refused.param, (number, refused.message)
            assert refused.param in refused.message and len(refused.message) < 1_000, (number, refused.message)
            outcomes["refused"] += 1
        except AssertionError as error:
            pytest.fail(f"{number} ({form}): {json.dumps(asked)[:2000]}: {error}")
        assert time.process_time() - begun < SECONDS, number
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 500 << 20
    assert outcomes["refused"] and outcomes["complete"] + outcomes["went on"] > count / 8, outcomes
