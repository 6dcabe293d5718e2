"""MODEL_MAP: which entry decides, and what a bad one is told."""

from __future__ import annotations

import pytest

from start_llm.core.modelmap import MOST_NAME, ModelMap, parse_model_map
from start_llm.core.settings import Settings, SettingsError, load_settings


def test_the_first_pattern_that_fits_decides() -> None:
    table = parse_model_map("claude-haiku-*=small, *-mini = owner/Small-1B,\nclaude-*=large,")
    assert [(entry.pattern, entry.model) for entry in table.entries] == [
        ("claude-haiku-*", "small"),
        ("*-mini", "owner/Small-1B"),
        ("claude-*", "large"),
    ]
    assert table.resolve("claude-haiku-4-5-20251001") == "small"
    assert table.resolve("claude-opus-4-1") == "large"
    assert table.resolve("GPT-5-Mini") == "owner/Small-1B", "case does not matter"
    assert table.resolve("openai/gpt-5-mini") == "owner/Small-1B", "nor does the provider in front"
    assert table.resolve("gpt-5-minimal") == "gpt-5-minimal"
    assert table.resolve("") == ""


def test_what_comes_out_is_not_looked_up_again() -> None:
    table = parse_model_map("a=b,b=a")
    assert (table.resolve("a"), table.resolve("b")) == ("b", "a")


def test_only_the_star_and_the_question_mark_are_signs() -> None:
    table = parse_model_map("claude-opus[1m]=large,gpt-?=small,hub/*=far")
    assert table.resolve("claude-opus[1m]") == "large"
    assert table.resolve("claude-opus1") == "claude-opus1"
    assert table.resolve("gpt-5") == "small" and table.resolve("gpt-51") == "gpt-51"
    assert table.resolve("hub/x") == "far" and table.resolve("other/hub") == "other/hub"


def test_a_name_of_any_length_costs_nothing() -> None:
    table = parse_model_map("*a*a*a*a*a*a*b=small")
    assert table.resolve("a" * 2_000_000) == "a" * 2_000_000
    assert table.resolve("a" * MOST_NAME) == "a" * MOST_NAME
    assert table.resolve("a" * 200 + "b") == "small" and table.resolve("aaaaab") == "aaaaab"


def test_side_requests_have_an_entry_that_no_name_fits() -> None:
    table = parse_model_map("@SIDE=small,*-mini=other")
    assert table.side == "small" and [entry.pattern for entry in table.entries] == ["@side", "*-mini"]
    assert table.resolve("@side") == "@side" and table.resolve("openai/@side") == "openai/@side"
    assert parse_model_map("side=small,*@side=small").side is None


def test_an_empty_table_changes_nothing() -> None:
    assert parse_model_map(" , \n") == ModelMap() == Settings(_env_file=None).models_by_name  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("claude-haiku-*", "'claude-haiku-*' is no entry; write pattern=model"),
        ("a=", "'a=' is no entry"),
        ("=small", "'=small' is no entry"),
        ("a b=c", "a pattern has no spaces in it"),
        ("a=small,b=*", "'*' is no model's name"),
        ("a=b=c", "'b=c' is no model's name"),
        ("a=b,A=c", "'A' stands in the table twice"),
        ("@side=b,@Side=c", "'@Side' stands in the table twice"),
        ("x" * 300 + "=b", "at most 256 characters"),
    ],
)
def test_a_bad_entry_is_told_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, model_map=text)
    assert says in str(caught.value) and str(caught.value).startswith("MODEL_MAP=")
    assert "\n" not in str(caught.value)
