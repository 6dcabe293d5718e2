"""Names and documents that a client sends reach the model, by the template or in front of the words."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message
from start_llm.prompt.fit import Fitter
from start_llm.prompt.hf import HFTemplate
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.traits import Traits
from tests.prompt.client import request, settings
from tests.prompt.models import TEMPLATES, model

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
