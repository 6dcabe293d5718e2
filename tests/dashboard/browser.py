"""Chromium for the tests of the page. Where there is none, they are skipped and say so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from start_llm.host.processes import wait_until
from tests.integration.live import Live
from tests.lazy import Package
from tests.waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

webdriver: Any = Package("selenium.webdriver")
errors: Any = Package("selenium.common.exceptions")
support: Any = Package("selenium.webdriver.support.wait")

MARKUP = "<img src=x onerror=window.pwned=1>"  # as a model's name, a folder's, a session's, ...
VIEWS = ("overview", "try", "models", "connect", "server")
WAIT = 120.0  # a bound, not a measure
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1440,1000")


@dataclass
class Browser:
    """One window."""

    driver: Any

    def open(self, url: str) -> None:
        self.driver.get(url)

    def all(self, css: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements("css selector", css)
        return found

    def one(self, css: str) -> WebElement:
        """The first element that is shown; waits for it."""
        return self.until(lambda: next((found for found in self.all(css) if found.is_displayed()), None), css)

    def text(self, css: str) -> str:
        """All text of the elements, whether shown or not."""
        return str(
            self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('\\n')", css)
        )

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def view(self, name: str) -> None:
        self.one(f'nav a[href="#{name}"]').click()
        self.one(f"#{name}")
        if name == "try":
            self.one("#said > *")  # its module is loaded with its first use

    def press(self, css: str) -> None:
        """Clicks the first such element once it can be clicked, wherever it moves to meanwhile."""
        self.until(lambda: self.one(css).is_enabled(), f"{css} to be enabled")
        self.run("document.querySelector(arguments[0]).click()", css)

    def send(self, text: str) -> None:
        """What somebody types into the chat."""
        self.run("document.getElementById('try-text').value = arguments[0]", text)
        self.press("#try-send")

    def ended(self) -> None:
        self.until(lambda: self.one("#try-again").is_enabled(), "the end of the answer")

    def listen(self) -> None:
        """From now on `sent` tells what the page has asked for."""
        self.run(
            "window.sent = []; const before = window.fetch; window.fetch = (path, options) => {"
            "if (options && options.body) window.sent.push(options.body); return before(path, options); }"
        )

    def sent(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.run("return window.sent")]

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """What `look` returns once that is true; an element that goes meanwhile is looked for again."""
        passing = [errors.StaleElementReferenceException]
        wait = support.WebDriverWait(self.driver, WAIT, poll_frequency=0.05, ignored_exceptions=passing)
        return wait.until(lambda _: look(), f"waited for {what}")

    def until_text(self, css: str, *words: str) -> str:
        def look() -> str | None:
            text = self.text(css)
            return text if all(word in text for word in words) else None

        try:
            return str(self.until(look, f"{words} in {css}"))
        except errors.TimeoutException as error:
            raise AssertionError(f"{error.msg}; what stands there: {self.text(css)[:2000]!r}") from None

    @contextmanager
    def wide(self, width: int, height: int = 900, dark: bool = False) -> Iterator[None]:
        """A window of another size, or in the dark scheme."""
        scheme = "dark" if dark else "light"
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    def complaints(self, *expected: str) -> list[str]:
        """What the browser's console said since the last look: errors, refused content. Without the `expected`."""
        said = [str(entry["message"]) for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [line for line in said if not any(word in line for word in expected)]


def ask(server: Live, said: str | list[dict[str, Any]], session: str, **more: Any) -> httpx.Response:
    """Its answer, read to its end. `said`: a user's words, or all messages. `agent`: who asks."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    headers = {"User-Agent": more.pop("agent", "pi/1.0")}
    body = {"model": "default", "messages": messages, "session_id": session, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT)


@contextmanager
def browser() -> Iterator[Browser]:
    """Skips the test where Chromium or its driver is missing, or does not start. Waits for one that is being installed:
    while the file is there that BROWSER_COMES names."""
    pytest.importorskip("selenium", reason="selenium is not installed (requirements-dev.txt)")
    wait_until(lambda: not os.path.exists(os.environ.get("BROWSER_COMES", "")), PATIENCE_SECONDS)
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    except errors.WebDriverException as error:
        pytest.skip(f"Chromium does not start here: {str(error.msg).splitlines()[0]}")
    try:
        window.set_page_load_timeout(WAIT)
        window.set_script_timeout(WAIT)
        yield Browser(window)
    finally:
        window.quit()
