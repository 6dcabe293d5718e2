"""Several calls of one turn, for templates that take one call in a message.

Such templates (gpt-oss, Llama 3) name a result after the call right before it. So a turn with the calls a and b and the
results of a and b is shown as call a, result a, call b, result b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from start_llm.core.messages import Message
from start_llm.prompt.reading import call_id


def interleaved(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with one call in a message, each call followed by its own results.

    Text and reasoning of a turn stay with its first call. A result belongs to the call of its turn that has its id; one
    without an id, to the first call that has no result yet. Results of no call of the turn come after all its calls.
    """
    return tuple(_interleaved(messages))


def _interleaved(messages: Sequence[Message]) -> Iterator[Message]:
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        results = []
        while index < len(messages) and messages[index].role == "tool":
            results.append(messages[index])
            index += 1
        yield from _turn(message, results)


def _turn(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """One assistant message with several calls, and the tool messages right behind it."""
    own: list[list[Message]] = [[] for _ in message.tool_calls]
    ids = {call_id(call.id): place for place, call in reversed(list(enumerate(message.tool_calls)))}
    rest: list[Message] = []
    nameless: list[Message] = []
    for result in results:
        if result.tool_call_id is None:
            nameless.append(result)
        elif call_id(result.tool_call_id) in ids:
            own[ids[call_id(result.tool_call_id)]].append(result)
        else:
            rest.append(result)
    for result in nameless:
        free = next((found for found in own if not found), rest)
        free.append(result)
    for place, call in enumerate(message.tool_calls):
        yield replace(message, tool_calls=(call,)) if not place else Message("assistant", tool_calls=(call,))
        yield from own[place]
    yield from rest
