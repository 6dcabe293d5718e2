from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from start_llm.models import device
from start_llm.models.device import GIB, LEAST_CACHE_BYTES, Accelerator
from start_llm.models.recommended import RECOMMENDED, Recommendation


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_chip_of_linux_comes_from_proc(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2GHz\n\nprocessor\t: 1\n")
    assert device.linux_chip(tmp_path) == "Some CPU @ 2GHz"


@pytest.mark.parametrize(("limit", "expected"), [("max", 16), (str(4 * GIB), 4), (str(2**63 - 4096), 16), ("0", 16)])
def test_a_containers_limit_counts_where_it_is_less(
    tmp_path: Path, limit: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Mock(total=16 * GIB))
    assert device.machine_memory(tmp_path) == 16 * GIB
    write(tmp_path, "sys/fs/cgroup/memory.max", limit + "\n")
    assert device.machine_memory(tmp_path) == expected * GIB


def test_a_folder_that_this_user_may_not_see_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = os.stat

    def stat(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if "hidden" in str(path):
            raise PermissionError(path)
        return looked(path, *more, **named)

    monkeypatch.setattr(os, "stat", stat)
    here, free = device.free_disk(tmp_path / "hidden" / "kv")
    assert here == tmp_path and free > 0


def test_an_unreadable_machine_is_no_error(tmp_path: Path) -> None:
    assert device.linux_chip(tmp_path) == (platform.machine() or "unknown chip")


def test_macos_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Mock(total=64 * GIB))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: Mock(stdout="Apple M4 Max\n"))
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    mac = device.inspect_device(lambda: Accelerator("metal", memory=48 * GIB))
    assert (mac.system, mac.chip, mac.memory, mac.usable) == ("macOS", "Apple M4 Max", 64 * GIB, 48 * GIB)
    assert mac.apple_silicon
    assert str(mac) == "Apple M4 Max, 68.7 GB, macOS, metal"
    assert device.inspect_device(lambda: Accelerator("metal")).usable == 48 * GIB


@pytest.mark.parametrize(
    ("system", "installed", "backend"),
    [("darwin", "", "metal"), ("linux", "", "cpu"), ("linux", "mlx-cuda-13", "cuda"), ("linux", "mlx-cuda-12", "cuda")],
)
def test_what_is_installed_says_where_mlx_will_compute(
    monkeypatch: pytest.MonkeyPatch, system: str, installed: str, backend: str
) -> None:
    monkeypatch.setattr(device.sys, "platform", system)
    monkeypatch.setattr(device, "distributions", lambda name: ["it"] if name == installed else [])
    assert device.likely_accelerator().backend == backend


def test_a_cuda_machine_is_named_by_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    gpu = device.inspect_device(lambda: Accelerator("cuda", name="NVIDIA H200", memory=139 * GIB))
    assert (gpu.chip, gpu.usable, gpu.apple_silicon) == ("NVIDIA H200", 139 * GIB, False)


@pytest.mark.parametrize("model", RECOMMENDED, ids=lambda model: model.repository)
def test_every_recommended_model_leaves_room_for_kv(model: Recommendation) -> None:
    usable = int(model.least_memory * device.USABLE_SHARE)
    assert device.default_cache_bytes(usable, model.weights) > LEAST_CACHE_BYTES


def test_cache_bytes_shrink_with_the_model_and_have_a_floor() -> None:
    small, large = (device.default_cache_bytes(48 * GIB, gib * GIB) for gib in (4, 40))
    assert small > large > LEAST_CACHE_BYTES
    assert small + 4 * GIB < 48 * GIB
    assert device.default_cache_bytes(4 * GIB, 5 * GIB) == LEAST_CACHE_BYTES
