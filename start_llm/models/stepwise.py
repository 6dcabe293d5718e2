"""How models of libraries beside mlx-lm, extras of the package, are loaded: no weight is read at first, then some in
each step.

Arrays belong to the model thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from start_llm.core.errors import NotSupported
from start_llm.models.checkpoint import LIBRARY_ERRORS

LOAD_BYTES = 64 << 20
"""Weights that are read in one step."""


@contextmanager
def refusing(library: str, name: str) -> Generator[None]:
    """What `library` (its name, for people) cannot load, whatever it says then. Raises NotSupported."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise NotSupported(f"{library} cannot load {name}: {error}") from error


def bytes_of(model: Any) -> int:
    """What a model's weights take in memory."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def read_weights(model: Any, told: Callable[[float], None] = lambda part: None) -> Generator[float]:
    """Reads what is still on disk of a model's weights. `told` gets the part that is done."""
    waiting: list[mx.array] = []
    done, all_bytes = 0, bytes_of(model)
    for _, array in tree_flatten(model.parameters()):
        waiting.append(array)
        if (size := sum(each.nbytes for each in waiting)) >= LOAD_BYTES:
            mx.eval(waiting)
            waiting = []
            done += size
            told(done / all_bytes)
            yield 0.0
    mx.eval(waiting)
    yield 0.0


def loading[Model](
    library: str, name: str, load: Callable[[], Any], make: Callable[[Any], Model]
) -> Generator[float, None, Model]:
    """What `make` makes of the model that `load` gives without its weights: they are read here. Raises NotSupported."""
    with refusing(library, name):
        model = load()
    yield from read_weights(model)
    return make(model)


def free_memory() -> None:
    """Gives back what nothing holds. What still holds itself is found by the loader: here that would hold all up."""
    mx.clear_cache()
