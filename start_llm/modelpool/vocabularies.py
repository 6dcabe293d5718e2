"""Tokenizers and what grammars need of them: read once for all models that have the same files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from start_llm.engine.decode.constraint import Grammars
from start_llm.files.lru import Lru
from start_llm.models.tokenizer import read_tokenizer, tokenizer_key

KEPT = 2
"""So many are kept without a model. One of 250,000 tokens takes about 300 MB with its grammars."""


class Vocabularies:
    """Those that models hold, and the last ones that were read; each is a `Grammars` with its tokenizer. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[str, Grammars] = WeakValueDictionary()
        self._last: Lru[str, Grammars] = Lru(KEPT)

    def read(self, folder: Path, eos: Any = None) -> Grammars:
        """Raises what `read_tokenizer` raises.

        Args:
            eos: the config's ``eos_token_id``.
        """
        key = tokenizer_key(folder, eos)
        with self._lock:
            found = self._held.get(key)
        if found is None:
            wrapper = read_tokenizer(folder, eos)
            found = Grammars(wrapper, wrapper.eos_token_ids)
        with self._lock:
            self._held[key] = found
        self._last.put(key, found)
        return found

    def of(self, wrapper: Any) -> Grammars:
        """Those of this tokenizer; new ones, if nobody has read it here."""
        with self._lock:
            found = next((each for each in self._held.values() if each.wrapper is wrapper), None)
        return found or Grammars(wrapper, wrapper.eos_token_ids)
