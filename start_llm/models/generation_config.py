"""Reads which sampling values a model's makers recommend: ``generation_config.json``. Knows no MLX.

Reasoning models repeat themselves without end when they are drawn almost greedily, so their makers warn of it, and
other servers (vLLM, LM Studio, Ollama) follow that file, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from start_llm.models.checkpoint import read_json
from start_llm.models.overrides import SAMPLING, sampling_number, sampling_range

FILE = "generation_config.json"
_NOT_GREEDY = ("temperature", "top_p", "top_k", "min_p")
"""What means nothing where the likeliest token is taken."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    values: Mapping[str, float] = field(default_factory=dict)  # what is recommended, by the names of `SAMPLING`
    odd: Mapping[str, str] = field(default_factory=dict)  # why a value cannot be used, by its name; empty: the file


def read_generation_config(folder: Path) -> GenerationConfig:
    """What stands in the checkpoint's ``generation_config.json``. A value that cannot be used is no recommendation.

    ``do_sample: false`` is no recommendation of a greedy choice: transformers writes its own default there, and passes
    over the values beside it, but for the repetition penalty.
    """
    try:
        data = read_json(folder / FILE)
    except FileNotFoundError:
        return GenerationConfig()
    except (OSError, ValueError) as error:
        return GenerationConfig(odd={"": f"{FILE} is passed over, it cannot be read: {error}"})
    if not isinstance(data, dict):
        return GenerationConfig(odd={"": f"{FILE} is passed over, it is no JSON object"})
    values: dict[str, float] = {}
    odd: dict[str, str] = {}
    for name in SAMPLING:
        given = data.get(name)
        if given is None or (data.get("do_sample") is False and name in _NOT_GREEDY):
            continue
        if name == "temperature" and given == 0:  # greedy is what makers write as do_sample, and what they warn of
            continue
        number = sampling_number(name, _top_k(given) if name == "top_k" else given)
        if number is None:
            shown = f"a {type(given).__name__}" if isinstance(given, list | dict) else repr(given)[:40]
            odd[name] = f"{FILE}: {name}={shown} is passed over, it must be {sampling_range(name)}"
        else:
            values[name] = number if name == "top_k" else float(number)
    return GenerationConfig(values, odd)


def _top_k(given: object) -> object:
    """As a whole number; -1 turns it off, as 0 does."""
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    return 0 if given == -1 else given
