"""What is taken from a Hugging Face tokenizer object."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from start_llm.core.limits import DEPTH
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.traits import TemplateError
from tests.prompt.models import fast_tokenizer


def test_a_tokenizer_without_a_template_gets_plain_chatml():
    text = HFTemplate(fast_tokenizer()).render([{"role": "user", "content": "x"}], None, True)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{% for x in %}", "{{ {}['a'].b.c }}"]
)
def test_every_failure_of_a_template_is_one_error(source):
    with pytest.raises(TemplateError):
        HFTemplate(fast_tokenizer(), source).render([{"role": "user", "content": "x"}], None, True)


def test_a_stopped_clock_takes_the_place_of_the_templates_own():
    user = [{"role": "user", "content": "x"}]
    text = "\n  {% if strftime_now is defined %}\n"
    text += '{%- macro m() %}{{ strftime_now( "%Y" ) }}{% endmacro %}{{ m() }}{% endif %}'
    template = HFTemplate(fast_tokenizer(), text + " {{ strftime_now('%H:%M') }} {{ y is defined }}")
    own = template.render(user, None, True)
    pinned = template.render(user, None, True, strftime_now=lambda form: {"%Y": "1970", "%H:%M": "noon"}[form], y=1)
    assert pinned == "\n1970 noon True" and own.startswith("\n20") and own.endswith("False")
    computed = HFTemplate(fast_tokenizer(), "{{ strftime_now('%Y' ~ '%m') }}")
    with pytest.raises(TemplateError, match="format of its date"):
        computed.render(user, None, True, strftime_now=str)
    assert HFTemplate(fast_tokenizer(), "plain").render(user, None, True, strftime_now=str) == "plain"


def test_special_tokens_and_ends_of_turns():
    inner = fast_tokenizer()
    assert HFTokenizer(inner, [5, 6]).eos_ids == {5, 6} and HFTokenizer(inner).eos_ids == frozenset()
    assert HFTokenizer(inner).special_tokens["<|im_end|>"] == inner.convert_tokens_to_ids("<|im_end|>")


def test_the_longest_token_is_no_shorter_than_any():
    inner = fast_tokenizer()
    assert HFTokenizer(inner).longest_token == max(len(token) for token in inner.get_vocab())


def test_the_tokenizer_itself_is_asked_only_if_it_says_the_same():
    class Other:
        """Adds a word where the inner one does not."""

        def __init__(self, inner):
            self._inner = inner

        def encode(self, text, **more):
            return [*self._inner.encode(text, **more), 7]

        def __getattr__(self, name):
            return getattr(self._inner, name)

    inner = fast_tokenizer()
    assert HFTokenizer(inner)._backend is inner.backend_tokenizer
    assert HFTokenizer(Other(inner))._backend is None
    assert HFTokenizer(Other(inner)).encode("the")[-1] == 7
    text = "the of <|im_start|> \n\nthe"
    assert HFTokenizer(inner).encode(text) == inner.encode(text, add_special_tokens=False)


WALKS = (
    "{% macro show(v) %}{% if v is mapping %}{% for k, x in v|dictsort %}{{ k }}{{ show(x) }}{% endfor %}"
    "{% elif v is sequence and v is not string %}[{% for x in v %}{{ show(x) }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}{{ show(messages[0].arguments) }}"
)


def test_what_is_as_deep_as_a_request_may_be_can_be_walked_by_a_template() -> None:
    def rendered(depth):
        value = "end"
        for level in range(depth):
            value = {"a": value} if level % 2 else [value]
        return HFTemplate(fast_tokenizer(), WALKS).render(
            [{"role": "user", "content": "", "arguments": value}], None, True
        )

    assert "end" in rendered(DEPTH.most)
    with pytest.raises(TemplateError):
        rendered(5_000)


@pytest.mark.live
def test_commands_that_load_no_model_do_not_import_transformers():
    """It takes seconds."""
    code = "import sys, start_llm.models.capabilities; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def with_rule(rule: str | None) -> HFTokenizer:
    core = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    if rule is not None:
        core.post_processor = processors.TemplateProcessing(rule, special_tokens=[("<s>", 0), ("</s>", 1)])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), [])


@pytest.mark.parametrize(
    ("rule", "text", "tokens"),
    [
        (None, "a b", [2, 3]),
        ("<s> $A", "a b", [0, 2, 3]),
        ("<s> $A", "<s> a", [0, 2]),  # it is there already
        ("<s> $A", "", [0]),
        ("<s> $A </s>", "a b", [0, 2, 3]),  # what ends a text does not end a prompt
        ("$A </s>", "a b", [2, 3]),
    ],
)
def test_a_raw_prompt_has_the_first_token_once(rule: str | None, text: str, tokens: list[int]) -> None:
    assert with_rule(rule).encode_raw(text) == tokens
