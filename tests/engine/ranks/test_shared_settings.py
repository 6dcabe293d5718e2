"""What rank 0 tells the other ranks of its settings."""

from __future__ import annotations

import json

from start_llm.core.settings import Settings, setting_names
from start_llm.engine.ranks.hosts import shared_settings


def test_no_key_goes_to_another_rank() -> None:
    keys = [name.lower() for name in setting_names() if name.endswith("_KEY")]
    assert len(keys) >= 3
    secrets = {name: f"a-secret-{number}" for number, name in enumerate(keys)}
    told = shared_settings(Settings.model_validate(secrets | {"max_kv_size": 512}))
    assert told["max_kv_size"] == 512 and "a-secret-" not in json.dumps(told)
