"""What every test may use: the options --slow and --e2e, and the embedded model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from rich.console import Console

from start_llm.models.embedded import ensure_embedded_model
from start_llm.progress import ProgressBars

LONGEST = {"engine", "fuzz", "integration", "prompt", "proxy", "scripts", "service", "stress", "vision"}
OPTIONAL = {"slow": "takes over ten seconds", "e2e": "drives a real agent client"}

# How long an example takes says how busy the machine is; pytest-timeout ends what hangs.
hypothesis_settings.register_profile("start_llm", deadline=None, derandomize=True)
hypothesis_settings.register_profile("start_llm-slow", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Every run tries the same examples, so that it fails by what was changed; with `--slow` it looks for new ones."""
    # A model that is asked something while it is loaded would be in the way of tests that count what a model does.
    os.environ.setdefault("MODEL_PROBE", "off")
    hypothesis_settings.load_profile("start_llm-slow" if config.getoption("--slow") else "start_llm")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in OPTIONAL.items():
        parser.addoption(f"--{name}", action="store_true", help=f"also run tests marked {name}: what {what}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The rooms with the longest tests come first: side by side, the last files to end are then short ones."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    for item in items:
        for name in OPTIONAL:
            if item.get_closest_marker(name) and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=f"run with --{name}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetches the embedded model before the first test, so that a slow network is not taken for a test that hangs."""
    if session.config.getoption("collectonly"):
        return
    for item in session.items:
        if "smol_path" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("skip"):
            embedded_model()
            return


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """The embedded model in float32, made once and kept in the user's cache folder."""
    return embedded_model()


def embedded_model() -> Path:
    folder = os.environ.get("START_LLM_CACHE_DIR", "~/.cache/start_llm")
    bars = ProgressBars(Console(stderr=True))
    return ensure_embedded_model(Path(folder).expanduser(), quantised=False, progress=bars)
