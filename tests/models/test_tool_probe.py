"""One prompt, one answer, every parser: with templates that behave like those of well-known families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

from start_llm.engine.checks import TooSlow
from start_llm.engine.probe import probe_tool_calls
from start_llm.models.background import at_once
from start_llm.models.tool_probe import ExpectedStyle, ToolCallProbe, read_call
from start_llm.parsing.registry import TOOL_FORMATS
from start_llm.prompt.probe import probe
from tests.models.callers import PARIS, bare_json, llama_json
from tests.parsing.formats import RENDER
from tests.prompt.models import fast_tokenizer, model

EXPECTED = ExpectedStyle(("hermes_json",), "think_tag")


def tried(
    family: str, said: str, expected: ExpectedStyle = EXPECTED, *, slow: bool = False, fault: Exception | None = None
) -> tuple[ToolCallProbe, str]:
    """What comes of it, and the prompt."""
    template, tokenizer = model(family)
    prompts: list[str] = []

    def answer(tokens: Sequence[int]) -> Iterator[int | None]:
        prompts.append(tokenizer.decode(tokens))
        yield None  # a chunk of the prompt is done
        yield from tokenizer.encode(said)
        if fault is not None:
            raise fault
        if slow:
            raise TooSlow

    streaming = lambda: NaiveStreamingDetokenizer(fast_tokenizer())  # noqa: E731
    trial = at_once(probe_tool_calls(template, tokenizer, probe(template, tokenizer), expected, streaming, answer))
    return trial, "".join(prompts)


@pytest.mark.parametrize(
    ("family", "ident"),
    [
        ("chatml", "hermes_json"),
        ("qwen3", "qwen3_coder"),
        ("qwen35", "qwen3_coder"),
        ("glm4", "glm47"),
        ("llama3", "llama"),
        ("mistral", "mistral"),
        ("harmony", "harmony"),
    ],
)
def test_the_tool_is_told_in_the_templates_way_and_the_call_is_known(family: str, ident: str) -> None:
    trial, prompt = tried(family, RENDER[ident](PARIS))
    assert (trial.outcome, trial.format) == ("called", ident)
    assert "get_weather" in prompt and "Paris" in prompt
    assert trial.tokens > 5 and ident in trial.report("hermes_json")


def test_a_template_that_opens_a_thought_is_read_from_inside_of_it() -> None:
    trial, prompt = tried("qwen35", "I look.\n</think>\n\n" + RENDER["hermes_json"](PARIS))
    assert trial.format == "hermes_json" and "Paris" in prompt


def test_a_model_that_fails_when_it_is_asked_is_served_and_asked_again() -> None:
    trial, _ = tried("chatml", "I", fault=KeyError("layer"))
    assert (trial.outcome, trial.format) == ("open", None) and "KeyError" in trial.why


def test_a_call_that_came_in_time_counts_on_a_slow_machine() -> None:
    assert tried("chatml", RENDER["hermes_json"](PARIS) + "\nand on", slow=True)[0].format == "hermes_json"
    trial, _ = tried("chatml", "I begin", slow=True)
    assert (trial.outcome, trial.said) == ("open", "I begin")


@pytest.mark.parametrize("ident", sorted(RENDER))
def test_every_format_is_known_by_its_own_marks(ident: str) -> None:
    found = read_call(RENDER[ident](PARIS), EXPECTED, in_reasoning=False)
    assert found is not None and found[0] is not None
    assert RENDER[found[0]](PARIS) == RENDER[ident](PARIS), "the same text, if not the same name"
    first = ExpectedStyle((ident,), "think_tag")
    assert read_call(RENDER[ident](PARIS), first, in_reasoning=False) in {(ident, None), (ident, "harmony")}


def test_every_format_is_tried() -> None:
    assert set(RENDER) == set(TOOL_FORMATS) - {"null"}


def test_what_has_no_mark_and_what_is_no_call() -> None:
    assert read_call(bare_json(PARIS), EXPECTED, in_reasoning=False) == (None, None)
    assert read_call(llama_json(PARIS), EXPECTED, in_reasoning=False) == ("llama", None)
    for text in ("", "Sunny.", "get_weather", RENDER["hermes_json"]([("get_weather", {"place": "Paris"})])):
        assert read_call(text, EXPECTED, in_reasoning=False) is None
    assert read_call(RENDER["mistral"]([("other_tool", {"city": "Paris"})]), EXPECTED, in_reasoning=False) is None
