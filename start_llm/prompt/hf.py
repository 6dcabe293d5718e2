"""A model's chat template and tokenizer, from a Hugging Face tokenizer (or mlx-lm's wrapper of one). Thread-safe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError
from transformers import PreTrainedTokenizerBase

from start_llm.core.prompt import FIRST_IMAGE_ID
from start_llm.prompt.guard import CUT
from start_llm.prompt.traits import VARIABLE, TemplateError

_TRIED = (
    "",
    " a",
    "The 1,234 words\n\n\tof\u00fc \u4e2d\u6587\U0001f642 aaaaaaaa",
    "<s></s> x <|im_end|>\n y ",
    "a\r\n\x00",
)
_SURROGATES = re.compile("[\ud800-\udfff]")
_MARKUP = re.compile(r"<[/|\uff5c]?[^\s<>]+>|\[/?[A-Z_]+\]")  # what looks like a control token
_LEADS = ("", "\n", "a\n", ".")  # texts behind which the rest of a cut text is encoded as if nothing was before
_ASKS = re.compile(r"\bstrftime_now\s*\(")
_FORMAT = re.compile(r"""\bstrftime_now\s*\(\s*(['"])([^'"\\]*)\1\s*\)""")
# The line break goes with the block before it, so the template itself begins a line as always.
_PINNED = "{% macro strftime_now(form) %}{{ pinned_dates[form] }}{% endmacro %}\n"
PLAIN_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class HFTemplate:
    """`apply_chat_template` of a tokenizer or processor. `reserved`: names that are no variables of a template."""

    reserved = frozenset(["messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters])
    reserved -= {"documents"}

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """`chat_template` replaces the tokenizer's own; with neither, plain ChatML is used."""
        self._tokenizer = tokenizer
        own = getattr(tokenizer, "chat_template", None) or getattr(tokenizer, "has_chat_template", False)
        self._override = chat_template or (None if own else PLAIN_CHATML)

    @property
    def source(self) -> str | None:
        """The text of all templates; None for one that is code."""
        own = self._override or getattr(self._tokenizer, "chat_template", None)
        return "\n".join(own.values()) if isinstance(own, dict) else own

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs`: template variables, plain data, or `VARIABLE`. Raises TemplateError."""
        clock = kwargs.pop(VARIABLE, None)
        try:
            if callable(clock):
                kwargs = {**self._stopped(clock, tools), **kwargs}
            elif self._override is not None:
                kwargs["chat_template"] = self._override
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as error:
            # Templates fail in every way that Python expressions can fail.
            raise TemplateError(str(error) or type(error).__name__) from error
        return str(text)

    def _stopped(self, clock: Callable[[str], str], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Arguments that make the template print the dates of `clock`.

        Template variables are plain data for transformers, so a macro in front of the template stands for the function.
        """
        text = self._override or self._tokenizer.get_chat_template(None, tools)
        formats = _FORMAT.findall(text)
        if len(formats) != len(_ASKS.findall(text)):
            raise TemplateError("the template computes the format of its date")
        dates = {form: clock(form) for _, form in formats}
        return {"chat_template": _PINNED + text if dates else text, "pinned_dates": dates}


def _backend(tokenizer: Any, special: Iterable[str]) -> Any:
    """The tokenizer proper, which is twice as quick, if it says what the object around it says; else ``None``."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return None
    texts = [*_TRIED, *(f"a {name}\n b" for name in special)]
    expected = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]  # also ends its truncating
    found = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return backend if found == expected else None


def _normal(tokenizer: Any, added: Iterable[Any]) -> Callable[[str], str] | None:
    normalizer: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or not any(token.normalized for token in added):
        return None
    changed = any(one not in normalizer.normalize_str(f"x{one}") for one in "A\uff21\u0301")
    return normalizer.normalize_str if changed else None  # type: ignore[no-any-return]


class HFTokenizer:
    """A fast tokenizer."""

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] | None = None) -> None:
        """`eos_ids` are the model's own, from its configuration, where the caller knows them."""
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token.content: int(index) for index, token in added.items() if token.special}
        unknown = [name for name in getattr(tokenizer, "all_special_tokens", []) if name not in special]
        special.update((name, int(tokenizer.convert_tokens_to_ids(name))) for name in unknown)
        self.special_tokens: dict[str, int] = special  # text to id
        self._added = [token.content for token in added.values() if not token.special]
        # What it makes of a text's letters before it looks for special tokens; None: they stay what they are.
        self.normal = _normal(tokenizer, added.values())
        if eos_ids is None:
            own = getattr(tokenizer, "eos_token_ids", None) or getattr(tokenizer, "eos_token_id", None)
            eos_ids = [own] if isinstance(own, int) else list(own or ())
        self.eos_ids = frozenset(int(index) for index in eos_ids)  # they end a turn
        # In characters, at least 1. Some count bytes: never less than characters.
        self.longest_token: int = max(map(len, tokenizer.get_vocab()), default=1)
        self._backend = _backend(tokenizer, special)
        self._front = self._put_in_front()
        self._lead = next((lead for lead in _LEADS if self._goes_on_behind(lead)), "")

    def _put_in_front(self) -> list[int]:
        """Of a text, by the tokenizer's own rule. What it puts behind ends a text, and a prompt goes on."""
        whole, alone = [int(token) for token in self._tokenizer.encode("a")], self.encode("a")
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(alone)] == alone), [])

    def encode_raw(self, text: str) -> list[int]:
        """A prompt without a template: behind what the tokenizer's own rule puts in front (BOS), which comes once."""
        tokens = self.encode(text)
        return tokens if tokens[: len(self._front)] == self._front else [*self._front, *tokens]

    def control_tokens(self, template: str | None) -> list[str]:
        """Texts that become one token each, and that only this template may write: `Guard`'s names.

        Tokenizers also have tokens for tags of HTML and for runs of blanks; these are no control tokens.
        """
        written = (name for name in self._added if template is None or name in template)
        return [*self.special_tokens, *filter(_MARKUP.fullmatch, written)]

    def _goes_on_behind(self, lead: str) -> bool:
        """Whether the tokens behind those of `lead` are as in the middle of a text."""
        first, start = self.encode(lead), self.encode("a<")
        for rest in ("im_end|> x", "|im_end|>\n", "/s>", " a"):
            tokens = self.encode(lead + rest)
            begun, behind = tokens[: len(first)], tokens[len(first) :]
            if begun != first or self.decode([*start, *behind]) != self.decode(start) + rest:
                return False
        return True

    def encode(self, text: str) -> list[int]:
        """Nothing is added at either end; special tokens in the text become their ids, but for those that are cut."""
        if not text.isascii():
            if CUT in text:
                return self._encode_cut(text)
            # JSON can carry half a surrogate pair, which has no UTF-8 form. One character stays one character.
            text = _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)
        if self._backend is not None:
            # A batch of one: only then do other threads run meanwhile. A million characters take a second.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _encode_cut(self, text: str) -> list[int]:
        """The parts between cuts, one behind the other."""
        first, *rest = text.split(CUT)
        skipped = len(self.encode(self._lead))
        tokens = self.encode(first)
        for part in rest:
            tokens += self.encode(self._lead + part)[skipped:]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens included."""
        written = [token for token in tokens if token < FIRST_IMAGE_ID]
        text = self._tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
