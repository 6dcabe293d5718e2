"""Chat templates read the items of messages as attributes, and where a loop stands; that is made cheap here.

``message.role`` of a dict is looked up as a Python attribute first, which fails with an exception, and then as an item.
A long conversation does that thousands of times in every turn: nearly half of what its template costs.

This is the one place that reaches into transformers' compiled templates; `tests/prompt/test_jinja.py` fails when
they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.runtime import LoopContext
from transformers.utils import chat_template_utils

_DICT_HAS = frozenset(dir(dict))
_OF_LOOPS = frozenset(["first", "index", "index0", "last", "length", "revindex", "revindex0"])


def read_items_first(chat_template: str) -> None:
    """From now on this template reads a dict's items without trying its attributes; what it prints stays the same.

    Items need none of the sandbox's checks: they are plain data, as a loop's numbers are. The names that a dict has
    itself go the old way.
    """
    compiled: Callable[[str], Any] | None = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiled is None:
        return  # templates are only slower
    environment = compiled(chat_template).environment  # kept by transformers, one for each text
    if "getattr" in vars(environment):
        return
    slow, undefined = environment.getattr, environment.undefined

    def quick(value: Any, name: str) -> Any:
        if type(value) is dict and name not in _DICT_HAS:
            return value[name] if name in value else undefined(obj=value, name=name)
        if name in _OF_LOOPS and type(value) is LoopContext:
            return getattr(value, name)
        return slow(value, name)

    environment.getattr = quick
