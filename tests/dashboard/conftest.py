"""A browser, a server and a page for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.browser import MARKUP, Browser, browser
from tests.integration.live import Live, live
from tests.memory_folder import memory_folder
from tests.oracle.build import build_oracle

# Refused in a test, or for a moment: pages that were left give their place back only when something is sent to them.
MAY_BE_REFUSED = ("/page/models/", "/v1/chat/completions", "/page/feed", "/page/stored")

CLEAR = """
const done = arguments[0];
localStorage.clear(); sessionStorage.clear();
const gone = indexedDB.deleteDatabase('start_llm');
gone.onsuccess = gone.onerror = gone.onblocked = () => done();
"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(window: Browser) -> Iterator[Live]:
    with memory_folder() as folder:
        model = build_oracle(folder / f"tiny{MARKUP}", "plain")
        with live(model, folder / "cache", drafts="off", kv_disk_dir="auto") as running:
            yield running


@pytest.fixture
def page(window: Browser, server: Live) -> Iterator[Browser]:
    """The page as a new visitor sees it; afterwards, nothing may have gone wrong in it."""
    window.open("about:blank")
    window.open(server.url)
    window.driver.execute_async_script(CLEAR)
    window.open(server.url)
    window.until_text("#state", "ready")
    yield window
    assert window.run("return [typeof window.pwned, document.images.length]") == ["undefined", 0]
    assert window.complaints(*MAY_BE_REFUSED) == []
