"""Words that no two conversations of a test run share, and that hide no value which a test looks for."""

from __future__ import annotations

from hashlib import sha256
from itertools import count

_NUMBERS = count()
# No digit and no letter of a hexadecimal number: a test that looks for "71ab" must not find it in here by chance.
_LETTERS = str.maketrans("0123456789abcdef", "ghijkmnopqrstuvw")


def unique() -> str:
    """32 letters, other ones at every call, the same ones in every run."""
    return sha256(str(next(_NUMBERS)).encode()).hexdigest()[:32].translate(_LETTERS)
