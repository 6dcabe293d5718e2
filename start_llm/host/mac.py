"""What a Mac says of itself that bears on a model server. Read-only. It was tested with stand-ins, not on a Mac."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution

from start_llm.core.sizes import as_size

ASK_SECONDS = 5.0
Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class MacFacts:
    """``None``: it does not say. `wired_limit_mb`: 0 where nobody has set it. `mlx_wheel`: the tags of the installed
    package."""

    version: str
    low_power: bool | None
    wired_limit_mb: int | None
    mlx_wheel: str = ""


def said(command: Sequence[str]) -> str:
    """Its standard output; empty where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def read_mac(ask: Ask = said, version: str | None = None) -> MacFacts:
    """`version`: of macOS; the system's own if it is not given."""
    mode = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", ask(["pmset", "-g"]), re.MULTILINE)
    limit = ask(["sysctl", "-n", "iogpu.wired_limit_mb"]).strip()
    own = platform.mac_ver()[0] if version is None else version
    wheel = distribution("mlx").read_text("WHEEL") or ""
    return MacFacts(own, None if mode is None else mode[1] == "1", int(limit) if limit.isdigit() else None, wheel)


def remarks(facts: MacFacts, chip: str, usable: int = 0, needed: int = 0) -> Iterator[tuple[bool, str]]:
    """(all is well, a line with what to do). `usable`, `needed`: bytes that the GPU may use now, and that the model's
    weights take; 0: nobody asked."""
    yield True, f"macOS {facts.version}"
    if facts.low_power:
        yield False, "low power mode is on, which slows the GPU: System Settings, Battery, Low Power Mode: Never"
    usable = usable or (facts.wired_limit_mb or 0) * 2**20
    limit = f"the GPU may use {as_size(usable)}"
    if facts.wired_limit_mb:
        limit += f" (iogpu.wired_limit_mb={facts.wired_limit_mb})"
    if needed > usable:
        more = f"`sudo sysctl iogpu.wired_limit_mb={needed // 2**20 + 1024}` allows it until the next start of the Mac"
        yield False, f"{limit}, the model's weights take {as_size(needed)}: {more}; or take a smaller model"
    elif usable:
        yield True, f"{limit}, the model's weights take {as_size(needed)}" if needed else limit
    if re.search(r"\bM([5-9]|\d\d)\b", chip):
        what = "the kernels for this chip's neural accelerators"
        good = "macosx_26" in facts.mlx_wheel
        remedy = "prefill is slower; on macOS 26 or newer install start_llm anew"
        yield good, f"MLX has {what}" if good else f"MLX is installed without {what}: {remedy}"
