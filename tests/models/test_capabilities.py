"""What a model's vocabulary and template say about how it writes, and of which family it is."""

from __future__ import annotations

import pytest

from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.models.capabilities import Fact, kind_of, read_hints
from start_llm.models.family import detect_family, families
from start_llm.parsing.registry import output_style


def words(*names: str) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


@pytest.mark.parametrize("style", [style for style in REASONING_STYLES.values() if style.start])
def test_tags_are_found_wherever_they_are_known(style) -> None:
    vocab, tags = words("a", style.start, style.end), (style.start, style.end)
    template = f"{{{{ '{style.start}\\n\\n{style.end}' }}}}"
    assert read_hints(None, vocab, None).reasoning == style.id and read_hints(None, vocab, None).budget
    assert read_hints(None, words("a"), tags).reasoning == style.id and not read_hints(None, words("a"), tags).budget
    assert read_hints(None, words("a"), None, template).reasoning == style.id
    assert output_style(reasoning_parser=style.id).reasoning.end == style.end


def test_what_the_tokenizer_says_comes_before_the_vocabulary_and_that_before_the_template() -> None:
    think, mistral = words("<think>", "</think>"), "[THINK][/THINK]"
    assert read_hints(None, think, ("<mull>", "</mull>"), mistral).reasoning == "tags"
    assert read_hints(None, think, None, mistral).reasoning == "think_tag"
    channels = words("<|channel|>", "<|message|>")
    assert read_hints(None, channels, ("<think>", "</think>")).reasoning == "harmony"
    generic = families()["generic"]
    assert read_hints(None, words("a"), None, "no tags").facts(generic)["reasoning_parser"] == Fact(
        "think_tag", "family"
    )
    form = output_style(reasoning_parser="tags", reasoning_tags=("<mull>", "</mull>"))
    assert (form.reasoning.start, form.reasoning.end) == ("<mull>", "</mull>")


def test_the_tool_format_is_that_of_the_template_or_of_the_vocabulary_or_of_the_family() -> None:
    def parser(known: str | None, vocab: dict[str, int], family: str = "generic") -> Fact:
        return read_hints(known, vocab, None).facts(families()[family])["tool_parser"]

    llama = words("a", "<|python_tag|>")
    assert parser(None, llama) == Fact("llama", "vocabulary")
    assert parser(None, words("<|python_start|>", "<|python_end|>")) == Fact("llama", "vocabulary")
    assert parser("json_tools", llama) == Fact("json_tools", "template"), "a Hermes model on Llama's tokens"
    assert parser(None, words("<|channel|>", "<|message|>")) == Fact("harmony", "vocabulary")
    assert parser(None, words("a"), "glm4") == Fact("glm47", "family")
    assert parser(None, words("a")) == Fact("hermes_json", "family")


@pytest.mark.parametrize(
    ("name", "kind", "family"),
    [
        ("Qwen3.6-27B-4bit", "qwen3_5", "qwen3"),
        ("my-model", "qwen3_moe", "qwen3"),
        ("Kimi-K2-Instruct", "deepseek_v3", "kimi"),
        ("DeepSeek-R1-Distill-Qwen-7B", "qwen2", "deepseek"),
        ("GLM-4.7-Flash", "glm4_moe_lite", "glm4"),
        ("gpt-oss-20b", "gpt_oss", "gpt-oss"),
        ("my-model", "gpt_oss", "gpt-oss"),
        ("SmolLM2-135M-Instruct", "llama", "generic"),
        ("", "", "generic"),
    ],
)
def test_the_family_is_known_by_name_and_architecture(name: str, kind: str, family: str) -> None:
    assert detect_family({"model_type": kind}, name).name == family
    token = detect_family({"model_type": kind}, name, ["<|python_tag|>"]).name
    assert token == ("llama" if family == "generic" else family), "it tells where nothing else says"


def test_every_family_can_be_used() -> None:
    for family in families().values():
        for ident in family.tool_parsers:
            assert output_style(tool_parser=ident, reasoning_parser=family.reasoning_parser or "think_tag")
        signs = (*family.names, *family.types)
        assert all(sign == sign.lower() for sign in signs) and (signs or family.name == "generic")


def test_kinds() -> None:
    assert kind_of({"model_type": "qwen3"}) == "text" and kind_of({}) == "text"
    assert kind_of({"model_type": "qwen3_vl", "vision_config": {}}) == "vision"
    assert kind_of({"model_type": "bert"}) == "embeddings" and kind_of({"model_type": "xlm-roberta"}) == "embeddings"
    assert kind_of({"model_type": "whisper"}) == "audio"
