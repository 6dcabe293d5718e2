"""Wired memory: what the GPU keeps resident (why: docs/engine.md). The one file that calls `mx.set_wired_limit`.

`wire_weights` sets the limit at most once, right after loading, to what the weights take: the set is full then, and no
buffer of KV that comes and goes enters it. Model thread only.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import mlx.core as mx

from start_llm.core.errors import NotSupported
from start_llm.core.sizes import as_size
from start_llm.models.device import GIB, Device

log = logging.getLogger(__name__)

WIRED_FROM = 32 * GIB  # of weights: below it no report shows a slow-down without wiring, but many show panics with it
WIRED_SHARE = 0.9  # of usable memory that weights may take and still be wired: the rest must stay free to move

_generate = importlib.import_module("mlx_lm.generate")  # as an attribute of mlx_lm that name is a function


@contextmanager
def no_wired_limit() -> Iterator[None]:
    """Inside of it a `BatchGenerator` may be made without its call to `mx.set_wired_limit`.

    Uses an internal of mlx-lm: `mlx_lm.generate` looks the function up by name, and ``None`` means "nothing was set".
    """
    theirs = _generate.maybe_set_recommended_wired_limit
    _generate.maybe_set_recommended_wired_limit = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _generate.maybe_set_recommended_wired_limit = theirs  # type: ignore[attr-defined]


def wired_bytes(setting: Literal["auto", "off"] | int, device: Device, weights: int) -> int | None:
    """Bytes to wire for the GPU, or ``None`` where MLX is not to be asked.

    `setting`: ``auto`` wires the weights alone, and only large ones that leave room. `weights`: bytes that are
    allocated once the model is loaded. Raises NotSupported: more than Metal allows.
    """
    if device.backend != "metal" or setting in ("off", 0):
        return None
    if setting == "auto":
        return weights if WIRED_FROM <= weights <= WIRED_SHARE * device.usable else None
    wanted = int(setting)
    if wanted > device.usable:
        raise NotSupported(f"WIRED_LIMIT={wanted}: Metal allows at most {device.usable} bytes on this machine.")
    return wanted


def wire_weights(setting: Literal["auto", "off"] | int, device: Device) -> bool:
    """To be called once, when the weights are loaded and nothing else is. True: something is wired now. Raises
    NotSupported: `setting` is more bytes than Metal allows."""
    mx.clear_cache()  # buffers left over from loading must not take the weights' place
    nbytes = wired_bytes(setting, device, mx.get_active_memory())
    if nbytes is None:
        return False
    mx.set_wired_limit(nbytes)
    log.info("%s are wired for the GPU", as_size(nbytes))
    return nbytes > 0


def unwire() -> None:
    """Before the models that are loaded change: else buffers of KV would take the place of weights that have gone."""
    mx.set_wired_limit(0)
    log.info("nothing is wired for the GPU any more: models come and go")
