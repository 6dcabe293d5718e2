"""What large bodies make of objects is there once, not once for each thread."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import Any

import pytest

from start_llm.api.common import fields
from start_llm.api.common.fields import BodyModel, parse_body
from start_llm.core.errors import BadRequest
from start_llm.core.jsontext import LARGE
from tests.together import together


class Body(BodyModel):
    """Any."""


def test_large_bodies_are_checked_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    there, most = threading.Semaphore(0), list[int]()

    def validate(model: type[Body], data: Any) -> Body:
        there.release()
        most.append(there._value)
        time.sleep(0.01)  # others would come meanwhile
        assert there.acquire(blocking=False)
        return model()

    monkeypatch.setattr(fields, "validate", validate)
    large = json.dumps({"text": "x" * LARGE}).encode()
    together([partial(parse_body, Body, large)] * 8)
    assert most == [1] * 8


def test_a_large_body_that_is_refused_keeps_no_other_one_waiting() -> None:
    wrong = json.dumps({"messages": [1] * LARGE}).encode()

    def refused() -> None:
        with pytest.raises(BadRequest):
            parse_body(Body, wrong)

    refused()
    other = threading.Thread(target=refused, daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
