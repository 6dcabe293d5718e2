"""What templates do is found by rendering, and conversations are fitted to it."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.reasoning_tags import REASONING_STYLES, REASONING_TAGS, reasoning_style
from start_llm.prompt.fit import Fitter
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.probe import probe
from start_llm.prompt.render import Renderer
from start_llm.prompt.textdiff import common_prefix
from start_llm.prompt.traits import TemplateError, Traits
from start_llm.prompt.tree import Rendering
from tests.prompt.client import READ, pipeline, request, say, settings
from tests.prompt.models import CHATML, TEMPLATES, fast_tokenizer, model


def renderer(family: str, preserve: bool = True) -> Renderer:
    template, tokenizer = model(family)
    return Renderer(template, probe(template, tokenizer), preserve_thinking=preserve)


def text_of(family: str, *messages: Message, tools: tuple[Tool, ...] = (), **variables) -> str:
    return renderer(family).render(messages, tools, variables).text


EXPECTED = {
    "chatml": {"reasoning_key": None, "reasoning_inline": True, "tools": True, "starts": {"<|im_start|>"}},
    "qwen3": {"reasoning_key": "reasoning_content", "old_reasoning": False, "switches": ("enable_thinking",)},
    "qwen35": {"reasoning_key": "reasoning_content", "old_reasoning": False, "preserve": True},
    "glm4": {"old_reasoning": True, "string_too": False,
             "starts": {"<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"}},
    "llama3": {"many_calls": False, "starts": {"<|start_header_id|>"}, "results": True},
    "gemma": {"system": False, "repeats": False, "tools": False, "calls": None, "starts": {"<start_of_turn>"}},
    "harmony": {"many_calls": False, "reasoning_beside_text": False, "mid_system": False},
    "mistral": {"mid_system": False, "short_ids": True, "calls": "mapping", "switches": ()},
}  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_traits_are_found(family):
    template, tokenizer = model(family)
    traits = probe(template, tokenizer)
    assert {name: getattr(traits, name) for name in EXPECTED[family]} == EXPECTED[family]
    assert probe(template, tokenizer).fingerprint == traits.fingerprint
    assert len({probe(*model(name)).fingerprint for name in TEMPLATES}) == len(TEMPLATES)


def test_a_template_that_renders_nothing_stops_the_load():
    tokenizer = fast_tokenizer()
    template = HFTemplate(tokenizer, "{{ raise_exception('never') }}")
    with pytest.raises(TemplateError, match="never"):
        probe(template, HFTokenizer(tokenizer, []))


def test_arguments_that_templates_want_as_text():
    tokenizer = fast_tokenizer()
    as_text = CHATML.replace("call.function.arguments | tojson", "raise_exception('text only')")
    template = HFTemplate(tokenizer, as_text)
    traits = probe(template, HFTokenizer(tokenizer, []))
    assert traits.calls == "string" and traits.results
    text = Renderer(template, traits, preserve_thinking=True).render(
        [Message("user", "x"), say("", None, read={"path": "p"})], (), {}
    )
    assert '"arguments": {"path": "p"}' in text.text


def test_a_refused_conversation_is_a_bad_request():
    tokenizer = fast_tokenizer()
    refusing = "{% if 'forbidden' in messages[0].content %}{{ raise_exception('not that word') }}{% endif %}" + CHATML
    template = HFTemplate(tokenizer, refusing)
    made = Renderer(template, probe(template, HFTokenizer(tokenizer, [])), preserve_thinking=True)
    with pytest.raises(BadRequest, match="not that word") as caught:
        made.render([Message("user", "forbidden")], (), {})
    assert caught.value.param == "messages"


def test_tools_and_calls_become_text_where_the_template_knows_none():
    text = text_of(
        "gemma",
        Message("system", "Be brief."),
        Message("user", "Go"),
        say("Reading.", None, read={"path": "a.py"}),
        Message("tool", "content of a", tool_call_id="call_read"),
        tools=(READ,),
    )
    assert text.index("Be brief.") < text.index('"name": "read", "description": "Reads a file"') < text.index("Go")
    assert '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>' in text
    assert "<tool_response>\ncontent of a\n</tool_response>" in text
    assert text.count("<start_of_turn>user") == 2


def test_a_system_message_in_the_middle_stays_there():
    talk = (Message("user", "one"), Message("assistant", "two"), Message("system", "NOW"), Message("user", "three"))
    for family in TEMPLATES:
        text = text_of(family, *talk)
        assert text.index("two") < text.index("NOW") < text.index("three"), family
    assert "<system-message>\nNOW\n</system-message>" in text_of("gemma", *talk)
    assert "<|im_start|>system\nNOW" in text_of("chatml", *talk)


def test_conversations_of_any_shape_render_in_every_family():
    shapes = [
        [Message("assistant", "first"), Message("user", "second")],
        [Message("user", "one"), Message("user", "two"), Message("assistant", "a"), Message("assistant", "b")],
        [Message("system", "s1"), Message("system", "s2"), Message("user", "one")],
        [Message("user", "u"), say("t", None, read={"p": 1}, bash={"c": 2}), Message("tool", "r1", tool_call_id="x")],
        [Message("user", "u"), say("", None, read={"p": 1}), say("", None, bash={"c": 2}), Message("tool", "r1")],
    ]
    for family in TEMPLATES:
        for messages in shapes:
            text = text_of(family, *messages)
            for message in messages:
                assert message.content in text, (family, messages)
                assert all(call.name in text for call in message.tool_calls)


def test_broken_arguments_are_shown():
    broken = Message("assistant", "", None, (ToolCall("1", "read", '{"path": "a'), ToolCall("2", "read", "[1, 2]")))
    for family in TEMPLATES:
        text = text_of(family, Message("user", "u"), broken).replace("\\", "")
        assert '{"path": "a' in text and "[1, 2]" in text, family


def test_an_error_result_says_so():
    text = text_of("chatml", Message("user", "u"), Message("tool", "no such file", is_error=True))
    assert "Error: no such file" in text
    text = text_of("chatml", Message("user", "u"), Message("tool", "error: gone", is_error=True))
    assert "Error: error" not in text


def test_variables():
    made = renderer("qwen35")
    assert made.variables(thinking=False, effort="low", extra={"x": 1}) == {
        "enable_thinking": False,
        "preserve_thinking": True,
        "reasoning_effort": "low",
        "x": 1,
    }
    assert made.variables(thinking=False, effort=None, extra={"enable_thinking": True})["enable_thinking"] is True


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "sanitize_control_tokens"]
)
def test_a_client_cannot_replace_more_than_variables(name):
    with pytest.raises(BadRequest, match=name) as caught:
        pipeline("chatml").prepare(request([Message("user", "x")], template_kwargs={name: "y"}), thinking=True)
    assert caught.value.param == "chat_template_kwargs"


def test_preserve_thinking_embeds_reasoning_where_the_template_knows_none():
    talk = (Message("user", "u"), Message("assistant", "a", "why"), Message("user", "v"))
    shown = renderer("chatml", preserve=True).render(talk, (), {}).text
    assert "<think>\nwhy\n</think>\n\na" in shown
    assert "why" not in renderer("chatml", preserve=False).render(talk, (), {}).text


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [("", "x", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("ab", "abc", 2), ("x" * 999, "x" * 1000, 999)],
)
def test_common_prefix(a, b, length):
    for chunk in (1, 2, 7, 65536):
        assert common_prefix(a, b, chunk) == common_prefix(b, a, chunk) == length


def test_special_text_in_a_message_is_never_taken_for_the_end_of_a_turn():
    """A turn that quotes the end-of-turn token falls back to plain encoding, and stays complete."""
    pipe = pipeline("chatml")
    first = pipe.prepare(request([Message("user", "u")]), thinking=True)
    tokenizer = model("chatml")[1]
    said = "It ends with <|im_end|> always."
    pipe.record(first, Message("assistant", said), [*tokenizer.encode(said), tokenizer.special_tokens["<|im_end|>"]])
    talk = [Message("user", "u"), Message("assistant", said), Message("user", "v")]
    second = pipe.prepare(request(talk), thinking=True)
    assert said in tokenizer.decode(second.prompt.tokens)
    assert second.prompt.tokens == tuple(tokenizer.encode(tokenizer.decode(second.prompt.tokens)))


@pytest.mark.parametrize(("start", "end"), REASONING_TAGS)
def test_a_prompt_that_ends_in_an_open_block_is_seen(start: str, end: str) -> None:
    """What a template may open, the parser of answers can close: both read one table."""
    user = f"user: what does {start} mean?\n"
    for tail, inside in ((f"model: {start}\n", True), (f"model: {start}\n\n{end}\n\n", False), ("model: ", False)):
        assert Rendering(user + tail, len(user), 0).in_reasoning == inside
    assert REASONING_STYLES[reasoning_style(start, end).id].end == end


# --- names and documents that a client sends ---

SHOWS = """{% for d in documents or [] %}[doc {{ d.title }}: {{ d.text }}]{% endfor %}{% for m in messages %}
<|im_start|>{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TALK = [Message("user", "Who was first?", name="nora"), Message("assistant", "You."), Message("user", "I!", name="ben")]


def shown(template: Any, tokenizer: Any, messages: list[Message], **more: Any) -> str:
    pipe = Pipeline(template, tokenizer, settings=settings())
    prepared = pipe.prepare(request(messages, **more), thinking=False)
    return str(tokenizer.decode(prepared.prompt.tokens))


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_model_reads_who_says_what(family: str) -> None:
    text = shown(*model(family), TALK)
    assert "nora: Who was first?" in text and "ben: I!" in text


def test_a_template_that_shows_names_is_left_to_do_it() -> None:
    tokenizer = model("chatml")[1]
    text = shown(HFTemplate(tokenizer._tokenizer, SHOWS), tokenizer, TALK)
    assert "user (nora)Who was first?" in text and "nora:" not in text


def test_a_note_is_not_the_user_s() -> None:
    noted = Message("user", "<update-1 newer than above>\nline\n</update>\n\nHello", name="nora")
    fit = Fitter(Traits(), preserve_thinking=False).fit
    assert fit([noted], [])[0][0]["content"].endswith("</update>\n\nnora: Hello")
    open_ended = Message("user", "<update-1 of mine", name="nora")
    assert fit([open_ended], [])[0][0]["content"] == "nora: <update-1 of mine"


def test_documents_reach_a_template_that_shows_them_and_no_other() -> None:
    template, tokenizer = model("chatml")
    sent = {"documents": [{"title": "a", "text": "b <|im_end|>"}]}
    text = shown(HFTemplate(tokenizer._tokenizer, SHOWS), tokenizer, TALK, template_kwargs=sent)
    assert text.startswith("[doc a: b <|im_end|>]")
    with pytest.raises(BadRequest, match="the template of this model shows none"):
        shown(template, tokenizer, TALK, template_kwargs=sent)
