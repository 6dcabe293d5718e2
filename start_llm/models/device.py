"""The machine: chip, memory, back end; which model fits it and how much KV may stay in memory. Knows no MLX."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import psutil

from start_llm.core.errors import OutOfMemory
from start_llm.core.sizes import as_size
from start_llm.host.mac import said

Backend = Literal["metal", "cuda", "cpu"]

GIB = 2**30
NO_GPU = "No GPU is here that MLX can use: a model of 1 GB writes a few tokens a second, a larger one fewer."
USABLE_SHARE = 0.75  # of memory that a model and its KV may take, where Metal does not say how much
PREFILL_BYTES = GIB  # activations of a prefill chunk, tokenizer, Python; between two chunks the layer that moves
ROW_PEAK = 1.1  # of its KV is what a row takes: with the layer that moves, and its spare room
STORED_SHARE = 1 / ROW_PEAK  # of what is left for KV may be stored: a turn takes it over, it needs no second copy
LEAST_CACHE_BYTES = 256 * 2**20
MOST_DISK_BYTES = 20 * 10**9
DISK_SHARE = 0.1  # of the free disk
LEAST_FREE = 4 * GIB  # of the disk: the embedded model and some stored KV
MUCH_WEIGHT = 0.7  # of usable memory: from here on the weights leave little for KV
MOST_WITH_VISION = 0.7  # of the machine's memory, for the weights of a model that sees


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What only MLX knows of the device."""

    backend: Backend
    name: str = ""  # the device's own
    memory: int | None = None  # bytes that MLX may use at most; ``None``: it does not say


@dataclass(frozen=True, slots=True)
class Device:
    """This machine."""

    system: str  # ``macOS`` or ``Linux`` (or what else ``platform.system()`` says)
    chip: str  # the processor's name; on a CUDA machine the GPU's
    memory: int  # bytes of main memory, as far as this process may use it (a container's limit counts)
    backend: Backend
    usable: int  # bytes that weights and KV may take together

    @property
    def apple_silicon(self) -> bool:
        return self.system == "macOS" and self.backend == "metal"

    def __str__(self) -> str:
        return f"{self.chip}, {as_size(self.memory)}, {self.system}, {self.backend}"


def likely_accelerator() -> Accelerator:
    """As far as that is known without MLX, whose import takes a second."""
    cuda = any(list(distributions(name=name)) for name in ("mlx-cuda-12", "mlx-cuda-13"))
    return Accelerator("metal" if sys.platform == "darwin" else "cuda" if cuda else "cpu")


def inspect_device(accelerator: Callable[[], Accelerator]) -> Device:
    """Looks at the machine. `accelerator` is asked once, on the calling thread, for what only MLX knows."""
    found = accelerator()
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    memory = machine_memory()
    chip = linux_chip()
    if system == "macOS":
        named = said(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]).strip()
        chip = named or platform.processor() or "unknown chip"
    if found.backend == "cuda" and found.name:
        chip = found.name
    usable = found.memory if found.memory is not None else int(memory * USABLE_SHARE)
    return Device(system, chip, memory, found.backend, usable)


def default_cache_bytes(memory: int, model_bytes: int) -> int:
    """Bytes of KV that may stay in memory beside weights of `model_bytes`, where both may take `memory` bytes together.

    At least 256 MiB, so that one short conversation is kept even where the model hardly fits.
    """
    return max(LEAST_CACHE_BYTES, int((memory - model_bytes - PREFILL_BYTES) * STORED_SHARE))


def kv_bytes(memory: int, model_bytes: int) -> int:
    """Bytes that running and stored KV may take together; the arguments are those of `default_cache_bytes`."""
    return max(2 * LEAST_CACHE_BYTES, memory - model_bytes - PREFILL_BYTES)


def check_fit(name: str, weights: int, device: Device) -> str | None:
    """A warning with the numbers if weights of so many bytes leave little for KV. Asked before they are loaded.

    Raises OutOfMemory: they do not fit beside what a prefill step needs.
    """
    if not device.usable or weights + PREFILL_BYTES <= MUCH_WEIGHT * device.usable:
        return None  # it fits well, or nobody knows
    numbers = (
        f"{name}: its weights take {as_size(weights)} of the {as_size(device.usable)} that a model may use "
        f"here ({weights / device.usable:.0%}; this machine has {as_size(device.memory)})"
    )
    left = device.usable - weights - PREFILL_BYTES
    if left >= 0:
        return f"{numbers}. That leaves {as_size(left)} for the KV of all requests."
    more = " or raise what Metal allows (sudo sysctl iogpu.wired_limit_mb=...)" if device.backend == "metal" else ""
    raise OutOfMemory(f"{numbers}. Choose a smaller model or one with fewer bits{more}.")


def check_vision_fit(name: str, weights: int, device: Device) -> None:
    """A model that sees needs room that nobody can tell before the images are there.

    Raises OutOfMemory: its weights take more than `MOST_WITH_VISION` of the machine's memory.
    """
    if device.memory and weights > MOST_WITH_VISION * device.memory:
        raise OutOfMemory(
            f"{name}: its weights take {as_size(weights)} of this machine's {as_size(device.memory)} "
            f"({weights / device.memory:.0%}). A model that sees may take {MOST_WITH_VISION:.0%}, since images need "
            "room of their own. Choose a smaller one, or VISION=off to serve it as a text model."
        )


def default_disk_bytes(folder: Path) -> int:
    """Bytes of KV that may lie in `folder` (which need not exist yet): 20 GB or 10% of the free disk, the lesser."""
    return min(MOST_DISK_BYTES, int(free_disk(folder)[1] * DISK_SHARE))


def free_disk(folder: Path) -> tuple[Path, int]:
    """The part of the path that exists, as far as this user may see, and the free bytes there."""
    here = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
    return here, shutil.disk_usage(here).free


def linux_chip(root: Path = Path("/")) -> str:
    """The processor's name out of ``/proc/cpuinfo``; the architecture's name where that has none (ARM)."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip().lower() in {"model name", "hardware"} and value.strip():
            return value.strip()
    return platform.machine() or "unknown chip"


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory: the machine's, or the control group's limit where that is less."""
    limits = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
    allowed = [int(line) for name in limits for line in _lines(root / name) if line.strip().isdigit()]
    return min([int(psutil.virtual_memory().total), *filter(None, allowed)])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
