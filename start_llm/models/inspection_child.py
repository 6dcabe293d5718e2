"""Reads an unknown model folder in a process of its own: tokenizer, chat template, and the model without its weights.

``python -m start_llm.models.inspection_child FOLDER NAME vision|text SECONDS`` writes lines of JSON to its standard
output: the name of each stage when it begins, and then the result or an error. The system ends it when a stage computes
for too long; `inspection`, its parent, does the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from start_llm.models.capabilities import ProbeResult
from start_llm.models.checkpoint import LIBRARY_ERRORS, read_config
from start_llm.models.family import detect_family
from start_llm.models.probe_table import encode
from start_llm.models.tokenizer import read_tokenizer, writing_hints
from start_llm.models.tool_probe import ToolCallProbe
from start_llm.models.vision import has_vision, read_text_model, read_with_vision
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.probe import probe
from start_llm.prompt.traits import TemplateError


def inspect_folder(
    folder: Path, name: str, vision: bool, seconds: Mapping[str, float], write: Callable[[dict[str, Any]], None]
) -> None:
    """Goes through the stages, each with its `seconds` of computing. Raises whatever the libraries raise."""

    def begin(stage: str) -> None:
        write({"stage": stage})
        signal.setitimer(signal.ITIMER_PROF, seconds[stage])  # its signal ends a process that does not handle it

    config = read_config(folder)
    begin("tokenizer")
    wrapper = read_tokenizer(folder)
    hints = writing_hints(wrapper)
    family = detect_family(config, name, wrapper._tokenizer.get_vocab()).name
    tokenizer = HFTokenizer(wrapper._tokenizer, eos_ids=wrapper.eos_token_ids)
    begin("chat template")
    try:
        traits = probe(HFTemplate(wrapper._tokenizer), tokenizer)
    except TemplateError:
        traits = None  # whoever builds the prompts of this model says why it cannot be served
    begin("model")
    if not (vision and has_vision(config) and _loads_with_vision(folder)):
        read_text_model(folder)
    trial = ToolCallProbe("open", why="MODEL_PROBE is off")
    write({"result": None if traits is None else encode(ProbeResult(family, hints, traits, trial))})


def _loads_with_vision(folder: Path) -> bool:
    try:
        read_with_vision(folder, lazy=True)
    except LIBRARY_ERRORS:  # the loader then serves it as a text model, and says why
        return False
    return True


def main() -> None:
    folder, name, vision, seconds = sys.argv[1:]
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not for the parent

    def write(line: dict[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    try:
        inspect_folder(Path(folder), name, vision == "vision", json.loads(seconds), write)
    except BaseException as error:  # noqa: BLE001 - the process's edge: Rust's panics are no Exceptions; told to the parent
        write({"error": f"{type(error).__name__}: {str(error)[:300]}"})
    os._exit(0)


if __name__ == "__main__":
    main()
