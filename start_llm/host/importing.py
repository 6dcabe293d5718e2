"""transformers, imported with a third of the computing.

Its package looks through each of its 1,650 files at import, line by line, for the names that they have; and then once
more, because what it keeps of that has room for 128 folders. Together that is a second at each start of a server. Here
each file is searched from its end, once. What is found is the same.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec
from typing import Any

PACKAGE = "transformers"
_NAMES = "__all__"


def import_transformers() -> bool:
    """Imports it, unless it is there already. False: it comes in its own way, when somebody imports it.

    For one thread, before others import.
    """
    spec = None if PACKAGE in sys.modules else find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return False
    package: Any = module_from_spec(spec)
    package.__version__ = metadata.version(PACKAGE)
    sys.modules[PACKAGE] = package  # parts of it can be imported now, before it has run
    try:
        _quicken(import_module(f"{PACKAGE}.utils.import_utils"))
        spec.loader.exec_module(package)
    except (ImportError, AttributeError):  # another version, whose inside is another
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        return False
    return True


def _quicken(inside: Any) -> None:
    """Raises AttributeError if that module is not as it was."""
    names, structure = inside.fetch__all__, inside.create_import_structure_from_path.__wrapped__
    inside.fetch__all__ = lambda text: names(_from_names(text))
    inside.create_import_structure_from_path = cache(structure)


def _from_names(text: str) -> str:
    """A source from the last line that begins with ``__all__``; empty without one."""
    at = text.rfind(f"\n{_NAMES}")
    return text[at + 1 :] if at >= 0 or text.startswith(_NAMES) else ""
