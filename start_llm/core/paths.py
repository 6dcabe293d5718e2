"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """With the home folder in place of ``~``; unchanged for a name that nobody has, where `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))
