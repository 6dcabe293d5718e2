from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.memory_folder import memory_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder
