"""The page in a real browser: charts, cancelling, models, agents, settings; and whether everybody can use it."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import tarfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.models.catalog import StoredModel
from start_llm.models.recommended import RECOMMENDED
from start_llm.proxy.nodes import NodeStatus
from tests.dashboard.browser import VIEWS, WAIT, Browser, ask
from tests.integration.live import Live
from tests.lazy import Package
from tests.oracle.oracle import script

webdriver: Any = Package("selenium.webdriver")
pytestmark = pytest.mark.thorough

AXE = "axe-core@4.14.1"
NPM_SECONDS = 120
# --- an empty server: this test stands first ----------------------------------------------------


def test_an_empty_overview_names_three_commands(page: Browser, server: Live) -> None:
    page.until_text("#first-run", "start-llm chat", "start-llm launch", "start-llm recommend")
    assert page.one("#first-run").is_displayed() and len(page.all("#first-run button[data-copy]")) == 3
    assert not page.all("#spared")[0].is_displayed()
    page.until_text("#charts", "nothing measured yet")
    ask(server, "Hello", "first", max_tokens=4)
    page.until(lambda: not page.all("#first-run")[0].is_displayed(), "it goes with the first request")


# --- what runs and what ran ----------------------------------------------------------------------


def test_charts_tell_the_last_hour_and_day_in_words_and_as_a_table(page: Browser, server: Live) -> None:
    for turn in range(2):
        ask(server, "the same words " * 200, "charted", max_tokens=4 + turn)
    ask(server, "[[long 40]]", "streamed", stream=True)
    page.until_text("#charts", "Tokens a second", "Time to the first token", "Memory of models and KV", "latest")
    page.until_text("#spared-words", "tokens not computed today")
    labels = "return [...document.querySelectorAll('#charts svg')].map((svg) => svg.ariaLabel)"
    page.until(lambda: all("last hour: latest" in label for label in page.run(labels)), "all four charts")
    assert len(page.run(labels)) == 4
    page.press("#charts-table summary")
    page.until_text("#charts-rows", "%")
    page.press('button[data-range="day"]')
    page.until(lambda: "last day" in page.run("return document.querySelector('#charts svg').ariaLabel"), "the day")
    assert page.one('button[data-range="day"]').get_attribute("aria-pressed") == "true"
    page.until_text("#charts-rows", "%")
    page.until_text("#pressure", "Memory", "weights", "running requests", "stored conversations")


def test_a_request_is_seen_reading_and_then_answering_and_is_cancelled_by_its_button(
    page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_SLEEP_PER_TOKEN", "0.0005")
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.05")
    words = "word by word " * 900 + "[[long 9000]]"
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, words, "endless", stream=True)))
    asking.start()
    page.until_text("#now .prefill", "endless", "reading", "tokens/s", "to compute")
    assert page.run("return document.querySelector('#now .prefill .bar').getAttribute('aria-label')")
    page.until_text("#now .answer", "endless", "answering", "tokens/s", "of memory")
    label = page.run("return document.querySelector('#now button').ariaLabel")
    assert label.startswith("Cancel the request of") and label.endswith(", endless")
    page.press("#now button")
    page.until_text("#now", "No request runs.")
    asking.join(WAIT)
    assert "cancelled on the server's page" in answers[0].text
    page.until_text("#ended .bad", "499")


# --- models, agents, settings ----------------------------------------------------------------------


def test_models_that_do_not_fit_stand_last_and_say_what_they_need(
    page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = StoredModel("a/large", tmp_path / "a", 4 * 10**13, 4096, ("tools",))
    stored = [large, StoredModel("b/small", tmp_path, 9, 9, ())]
    monkeypatch.setattr("start_llm.api.ops.page.stored_models", lambda *places: stored)
    known = [
        replace(RECOMMENDED[0], short=short, weights=weights, least_memory=0, kv=1)
        for short, weights in (("vast", 4 * 10**13), ("tiny", 9))
    ]
    monkeypatch.setattr("start_llm.api.ops.page.RECOMMENDED", known)
    page.view("models")
    page.until_text("#models-list", "a/large", "b/small", "does not fit: needs 40.0 TB")
    tiny, vast = page.all("#known button")
    assert (tiny.accessible_name, tiny.get_attribute("class")) == ("Fetch tiny", "")
    assert vast.accessible_name.startswith("Fetch vast, does not fit: needs 40.0 TB, there are ")
    assert vast.accessible_name.endswith(vast.get_attribute("title")) and vast.get_attribute("class") == "back"
    assert page.run("return document.querySelector('#models-list tr').textContent").startswith("b/small")
    assert "GiB" not in page.text("main") and "MiB" not in page.text("main"), "one unit"


def test_agents_say_whether_they_are_installed_and_clients_get_snippets(
    page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pi").write_text("#!/bin/sh\n")
    (tmp_path / "pi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    page.view("connect")
    page.until_text('[data-agent="pi"] .installed', "installed")
    page.until_text('[data-agent="claude"] .installed', "not found on the server's PATH")
    assert not page.all('[data-agent="pi"] .install')[0].is_displayed()
    assert "npm install" in page.one('[data-agent="claude"] .install').text
    page.until_text("#snippets", f"OPENAI_BASE_URL={server.url}/v1", "ANTHROPIC_BASE_URL", "curl", "from openai")
    context = server.get("/v1/models").json()["data"][0]["context_length"]
    page.until_text("#snippets", "Open WebUI", "Zed", "VS Code", f'"max_tokens": {context}')
    assert len(page.all("#snippets button")) == 7
    (tmp_path / "pi").rename(tmp_path / "claude")
    page.view("overview")
    page.view("connect")  # which looks again
    page.until(lambda: page.text('[data-agent="claude"] .installed') == "installed", "what was installed meanwhile")
    page.until_text('[data-agent="pi"] .installed', "not found")


def test_settings_are_filtered_and_the_level_of_the_log_can_change(page: Browser, server: Live) -> None:
    before = logging.getLogger("start_llm").level
    try:
        page.view("server")
        page.until_text("#settings", "MODEL_PATH")
        page.one("#settings-filter").send_keys("log level")
        page.until_text("#settings-told", "1 of")
        assert [row.text.split()[0] for row in page.all("#settings tr") if row.is_displayed()] == ["LOG_LEVEL"]
        page.run(
            "const select = document.querySelector('#settings select');"
            "select.value = 'info'; select.dispatchEvent(new Event('change'))"
        )
        page.until_text("#settings-told", "LOG_LEVEL is info until the server ends")
        assert logging.getLogger("start_llm").level == logging.INFO
    finally:
        logging.getLogger("start_llm").setLevel(before)


def test_nodes_are_rows(page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    page.view("server")
    page.until_text("#settings", "MODEL_PATH")
    assert not page.all("#nodes")[0].is_displayed(), "there is this server alone"
    known = NodeStatus("mac-1:8080", "busy", 3, 2, "1.0", ("a", "b"), ("a",), 4 * 10**9, 123_456, 9)
    found = [asdict(known) | {"share": 0.75}, asdict(NodeStatus("mac-2:8080", "gone", detail="refused")) | {"share": 0}]
    monkeypatch.setattr("start_llm.api.ops.page.look_at", lambda *asked: found)
    page.view("overview")
    page.view("server")
    page.until_text("#nodes-list", "mac-1:8080", "mac-2:8080")
    rows = [row.text.replace("\n", " ") for row in page.all("#nodes-list tr")]
    assert rows == ["mac-1:8080 busy 1.0 a 3 2 4.0 GB 123,456 75%", "mac-2:8080 gone refused"]


# --- for everybody ---------------------------------------------------------------------------------


def test_the_first_key_leads_past_the_head_of_the_page(page: Browser) -> None:
    page.driver.switch_to.active_element.send_keys(webdriver.Keys.TAB)
    skip = page.driver.switch_to.active_element
    assert skip.text == "To the content"
    skip.send_keys(webdriver.Keys.ENTER)
    assert page.run("return [document.activeElement.id, location.hash]") == ["main", ""], "the view stays"


def test_nothing_moves_for_who_wants_that(page: Browser) -> None:
    media = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        moving = page.run(
            "return [...document.querySelectorAll('*')].filter((e) => { const s = getComputedStyle(e);"
            "return s.transitionDuration !== '0s' || s.animationName !== 'none'; }).length"
        )
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert moving == 0


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which is fetched for the test and is no part of the package."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("needs npm, to fetch axe-core")
    try:
        packed = subprocess.run(
            [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=NPM_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"npm does not bring {AXE}: {error}")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


LOOK = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ['violations'] }).then((found) => done(found.violations
  .filter((one) => ['serious', 'critical'].includes(one.impact))
  .map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 200))])));
"""


MARKDOWN = """## Title

Of $x^2$ and `code` and a [link](https://example.com).

```python
def f(n: int) -> str:  # a comment
    return "text" * 2
```

| a | b |
|---|--:|
| 1 | 2 |

> quoted
"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_axe_finds_nothing_serious(page: Browser, server: Live, axe: str, width: int, dark: bool) -> None:
    ask(server, "Something [[long 40]]", "looked-at")
    page.until_text("#ended", "looked-at")
    page.run(axe)
    with page.wide(width, dark=dark):
        for name in VIEWS:
            page.view(name)
            if name == "try":
                page.until(lambda: len(page.all("#try-model option")) > 1, "the models")
                page.run("document.querySelector('#try-form details').open = true")
                page.send(script(MARKDOWN))
                page.until(lambda: page.all("#said .rich math"), "the formula")
                page.ended()
            if name == "overview":
                page.press("#ended details summary")
                page.until_text("#ended dl", "told")
            if name == "server":
                page.until_text("#settings", "MODEL_PATH")
            found = page.driver.execute_async_script(LOOK)
            assert found == [], (name, json.dumps(found, indent=1))
