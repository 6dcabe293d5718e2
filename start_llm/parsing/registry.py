"""The ids of tool-call formats and reasoning styles, and how a model's pair is put together. Which pair a model has is
decided in `models.capabilities`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from start_llm.core.messages import Tool
from start_llm.core.reasoning_tags import REASONING_STYLES, ReasoningStyle, reasoning_style
from start_llm.parsing.calls import Opener, ToolFormat
from start_llm.parsing.tools.headed import DEEPSEEK, FUNCTION_GEMMA, GEMMA4, HARMONY, KIMI_K2, MISTRAL
from start_llm.parsing.tools.hermes import HY_V4, INKLING, K2_HORIZON, LONGCAT, SHARED
from start_llm.parsing.tools.minimax_m3 import MINIMAX_M3
from start_llm.parsing.tools.pythonic import LLAMA, PYTHONIC
from start_llm.parsing.tools.tagged import DEEPSEEK_V4, KIMI_K3, MINICPM5, MINIMAX_M2, MUSE_SPARK

_HELD_ANSWERS = 8


class StrayEndTags:
    """Whether a model has lately closed reasoning blocks that nobody had opened.

    Some models think at once and write the closing tag only, where their template has not opened the block. A streamed
    answer shows that thought as text, the first time. After that, a model's next answers are held back until their
    closing tag, their first call or their end. All requests of a model share it; any thread (lost updates do no harm).
    """

    def __init__(self) -> None:
        self._left = 0

    @property
    def likely(self) -> bool:
        return self._left > 0

    def seen(self) -> None:
        """An answer has one: the next ones may."""
        self._left = _HELD_ANSWERS

    def missed(self) -> None:
        """An answer that was held back for one has none."""
        self._left = max(0, self._left - 1)


@dataclass(frozen=True)
class OutputStyle:
    """How a model writes: its reasoning, its own tool-call format, and those recognised whatever the family.

    `stray_ends` is what its answers have shown so far; all else is immutable.
    """

    reasoning: ReasoningStyle
    tools: ToolFormat
    others: tuple[ToolFormat, ...] = (SHARED,)
    stray_ends: StrayEndTags = field(default_factory=StrayEndTags, compare=False)

    def openers(self, tools: Sequence[Tool]) -> tuple[Opener, ...]:
        """All openers; where two share a literal, the later one counts, and that is the model's own."""
        return tuple(opener for form in (*self.others, self.tools) for opener in form.openers_for(tools))

    @property
    def closers(self) -> frozenset[str]:
        return frozenset(closer for form in (*self.others, self.tools) for closer in form.closers)


# Recognised whatever the family, by what stands in the text.
_SHARED_IDS = ("hermes_json", "json_tools", "qwen3_coder", "glm47", "glm4_native", "glm4_xml", "llama_xml", "laguna")
SHARED_SIGNS: dict[str, re.Pattern[str]] = {
    ident: re.compile(sign)
    for ident, sign in {
        **dict.fromkeys(("hermes_json", "json_tools"), r"<tool_call>\s*(?:```\w*\s*)?[\[{]"),
        "qwen3_coder": r"<function=[\w.\-:/]+>\s*(?:<parameter=|</function>)",
        **dict.fromkeys(("glm47", "glm4_native", "laguna"), r"<tool_call>\s*[\w.\-:/]+\s*(?:<arg_key>|</tool_call>)"),
        "glm4_xml": r"<tool_call>\s*<name>",
        "llama_xml": r"<function=[\w.\-:/]+>\s*\{",
        "llama": r'(?m)^\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]+"\s*,\s*"parameters"\s*:',
    }.items()
}
"""How calls begin in formats that are read whatever the family: by this it is told which of them was written."""
_OWN = (
    *(DEEPSEEK, GEMMA4, FUNCTION_GEMMA, KIMI_K2, KIMI_K3, LLAMA, LONGCAT, MINICPM5, MINIMAX_M2, MISTRAL),
    *(MUSE_SPARK, PYTHONIC, HARMONY, DEEPSEEK_V4, HY_V4, INKLING, K2_HORIZON, MINIMAX_M3),
)
TOOL_FORMATS: dict[str, ToolFormat] = {
    form.id: form for form in (*(ToolFormat(ident) for ident in ("null", *_SHARED_IDS)), *_OWN)
}
_RAW = (KIMI_K3, MINICPM5, MINIMAX_M2, MUSE_SPARK, GEMMA4, FUNCTION_GEMMA, DEEPSEEK_V4, HY_V4, K2_HORIZON, MINIMAX_M3)
RAW_STRINGS = frozenset((*_SHARED_IDS[2:], *(form.id for form in _RAW)))
"""Formats in which a string argument stands as it is, not as JSON."""


def output_style(
    *,
    tool_parser: str = "null",
    reasoning_parser: str = "null",
    reasoning_tags: tuple[str, str] | None = None,
) -> OutputStyle:
    """The style for a pair of ids. Raises ValueError for an id that is not known, with nothing that stands for it.

    Args:
        reasoning_tags: (start, end) as mlx-lm's tokenizer found them; used where `reasoning_parser` is no id of ours.
    """
    reasoning = REASONING_STYLES.get(reasoning_parser)
    if reasoning is None and reasoning_tags is not None:
        reasoning = reasoning_style(*reasoning_tags)
    if reasoning is None:
        raise ValueError(f"reasoning parser {reasoning_parser!r} is not known; known are {sorted(REASONING_STYLES)}")
    form = TOOL_FORMATS.get(tool_parser)
    if form is None:
        raise ValueError(f"tool parser {tool_parser!r} is not known; known are {sorted(TOOL_FORMATS)}")
    return OutputStyle(reasoning, form)
