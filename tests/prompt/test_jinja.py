"""Items of messages are read without an exception each, and templates print what they printed before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from start_llm.prompt.hf import HFTemplate, read_items_first
from start_llm.prompt.traits import TemplateError
from tests.prompt.models import fast_tokenizer

# A new text for this file: transformers keeps what it compiled, and with it what was changed.
ODD = """{# of test_jinja #}
{%- for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.nothing }}|{{ m.nothing is defined }}|{{ m['role'] }}
{%- for key, value in m.items() %};{{ key }}={{ value }}{% endfor %}{{ m.get('content') }}{{ m.keys() | list }}
{{- m.extra.inner.name }}{{ m.content.strip() }}{{ m.content | length }}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}
{{- loop.index }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.cycle('a', 'b') }}{{ loop.depth }}
{% endfor %}"""


def test_upstream_still_compiles_templates_as_this_room_expects():
    source = "{# of the upstream test #}{{ messages[0].role }}"
    read_items_first(source)
    environment = chat_template_utils._compile_jinja_template(source).environment
    quick = vars(environment)["getattr"]
    read_items_first(source)
    assert vars(environment)["getattr"] is quick  # changed once

    looked = []
    environment.getattr = lambda value, name: looked.append(name) or quick(value, name)
    text = HFTemplate(fast_tokenizer(), source).render([{"role": "user", "content": "x"}], None, False)
    assert text == "user" and looked == ["role"]  # it is the one that templates use


inner = st.dictionaries(st.sampled_from(("name", "items")), st.text(max_size=3))
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("user", "assistant")),
        "content": st.text(max_size=8),
        "extra": st.fixed_dictionaries({"inner": inner}),
    }
)


def test_a_template_prints_the_same():
    plain, ours = chat_template_utils._cached_compile_jinja_template(ODD), HFTemplate(fast_tokenizer(), ODD)

    @given(st.lists(message, min_size=1, max_size=3))
    def prints_the_same(messages):
        assert ours.render(messages, None, False) == plain.render(messages=messages)

    prints_the_same()


@pytest.mark.parametrize("source", ["{{ messages[0].__class__ }}", "{{ messages[0].update({'a': 1}) }}"])
def test_the_sandbox_stays_closed(source):
    assert "dict" not in render_or_error(source)


def render_or_error(source: str) -> str:
    try:
        return HFTemplate(fast_tokenizer(), source).render([{"role": "user", "content": "x"}], None, False)
    except TemplateError:
        return "refused"
