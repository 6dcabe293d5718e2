"""Libraries that serving a text model does not need: extras of the package. Standard library only.

One rule: what is missing is off, and whoever needs it is told the command that adds it. `install_and_run.py` installs
those of `OF_A_CLONE`; ``uv tool install`` those that are named: ``'.[proxy,vision]'``.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from start_llm.core.errors import NotSupported

SOURCES = Path(__file__).resolve().parents[2]
"""The folder that this package is imported from: a clone, or site-packages."""


class Extra(NamedTuple):
    """`what`: how a sentence about it begins. `pins`: as in pyproject.toml."""

    name: str
    what: str
    pins: tuple[str, ...]


_TABLE = tomllib.loads(Path(__file__).with_name("extras.toml").read_text("utf-8"))
EXTRAS = {library: Extra(row["name"], row["what"], tuple(row["pins"])) for library, row in _TABLE.items()}
"""By the library that is imported."""
OF_A_CLONE = tuple(pin for library in ("litellm", "mlx_vlm") for pin in EXTRAS[library].pins)


def is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the package above it
        return False


def check_installed(library: str) -> None:
    """Raises NotSupported, which says how the extra is installed."""
    if not is_installed(library):
        raise NotSupported(missing(library), code="extra_not_installed")


def missing(library: str) -> str:
    """A sentence, with the command that adds the extra to this installation, from any folder."""
    extra, constraints = EXTRAS[library], SOURCES / "constraints.txt"
    words = [str(Path(sys.prefix) / "bin" / "uv"), "pip", "install", "-p", sys.executable, *extra.pins]
    command = shlex.join([*words, *(["-c", str(constraints)] if constraints.is_file() else [])])
    return f"{extra.what} an extra that is not installed ({extra.name}). To add it: `{command}`"
