"""Grammars for gpt-oss, which writes messages with headers: ``<|channel|>final<|message|>text``.

Its reasoning is messages of their own, so the whole answer is one grammar: some messages of thought, then the message
that was asked for. The prompt ends in ``<|start|>assistant``.
"""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.parsing.structured_tools import ANY_TEXT, CallableTool, Lark, Markers, json_arguments, literal

MOST_THOUGHTS = 8
"""Messages before the one that was asked for."""


def harmony_answer(
    lark: Lark, markers: Markers, json_text: str | None, calls: Sequence[CallableTool], *, free: bool
) -> str:
    """The start rule's body.

    Args:
        json_text: body of the rule for a final message that is JSON.
        calls: the tools that may be called; one of them, since the token that ends a call ends the answer.
        free: the final message may be any text.
    """
    lark.rule("SPACE", r"/[ \t\r\n]{1,4}/")
    lark.rule("TEXT", f"/{ANY_TEXT}/")
    before = f'{markers("<|channel|>")} ("analysis" | "commentary") {markers("<|message|>")} TEXT'
    lark.rule("thought", f'{before} {markers("<|end|>")} {markers("<|start|>")} "assistant"')
    final = f'{markers("<|channel|>")} "final" {markers("<|message|>")}'
    options = [f"{final} SPACE? {lark.rule('json_text', json_text)}"] if json_text is not None else []
    if free:
        options.append(f"{final} TEXT")
    if calls:
        head = f'{markers("<|channel|>")} "commentary to=functions."'
        json_type = f'" " {markers("<|constrain|>")}' if markers.is_token("<|constrain|>") else '" "'
        message = f'{json_type} "json" {markers("<|message|>")}'
        bodies = [f"{literal(call.name)} {message} {json_arguments(call)}" for call in calls]
        options.append(f"{head} ({' | '.join(lark.rule(f'call_{i}', body) for i, body in enumerate(bodies))})")
    return f"thought{{0,{MOST_THOUGHTS}}} ({' | '.join(options)})"
