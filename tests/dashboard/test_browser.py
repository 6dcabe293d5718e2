"""The page in a real browser, filled by real requests to the oracle. One browser and one server for all of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from start_llm.core.report import StoredSegment, StoredTree
from start_llm.core.service import Health
from start_llm.core.settings import Settings
from start_llm.models.pull import Pulled
from tests.api.fakes import FakeService, make_server
from tests.cli.places import checkpoint, safetensors
from tests.dashboard.browser import MARKUP, VIEWS, WAIT, Browser, ask
from tests.integration.live import TOOLS, Live
from tests.lazy import Package
from tests.models.hub import Hub, running, use
from tests.oracle.oracle import script

webdriver: Any = Package("selenium.webdriver")
pytestmark = pytest.mark.thorough

LONG = "[[long 40]]"  # enough words to prove a conversation by


def say(server: Live, messages: list[dict[str, Any]], session: str, **more: Any) -> dict[str, Any]:
    """The answer's message, with the response's id as ``id``."""
    answer = ask(server, messages, session, **{"max_tokens": 400, **more})
    assert answer.status_code == 200, answer.text
    return {**answer.json()["choices"][0]["message"], "id": answer.json()["id"]}


def conversation(server: Live, session: str, agent: str = "pi/1.0", **more: Any) -> list[dict[str, Any]]:
    """Two turns; all messages of the third request."""
    words = f"{session} asks. " * 60
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You help.\n{words}\nmode: read"},
        {"role": "user", "content": f"First {LONG}"},
    ]
    for number in range(2):
        answer = say(server, messages, session, agent=agent, **more)
        messages.append({"role": "assistant", "content": answer["content"]})
        messages.append({"role": "user", "content": f"then {number} {LONG}"})
    return messages


# --- overview ---------------------------------------------------------------------------------


def test_the_overview_tells_of_real_requests(page: Browser, server: Live) -> None:
    conversation(server, "first-talk")
    conversation(server, "second-talk", "opencode/2.0")
    page.until_text("#ended", "first-talk", "second-talk", "computed")
    page.until_text("#reuse", "%", "of prompt tokens reused", "1.00: only what is new", "for stored conversations")
    page.until_text("#conversations", "first-talk", "second-talk", "100%")
    page.until_text("#day", "pi", "opencode", "% of")
    assert page.run("return document.querySelectorAll('#day svg path.fill-reused').length") >= 2
    page.until_text("#bytes", "in memory", "with what runs now", "of it filled", "on disk")
    page.until_text("#cache-told", "pieces", "tokens in memory")
    assert painted(page), "the tree is drawn"


def painted(page: Browser) -> bool:
    return bool(
        page.run(
            "const c = document.getElementById('icicle'); if (!c.width) return false;"
            "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value)"
        )
    )


def test_a_miss_is_explained_with_a_difference_and_a_note_is_shown(page: Browser, server: Live) -> None:
    messages = conversation(server, "told-talk")
    changed = [{**messages[0], "content": messages[0]["content"].replace("mode: read", f"mode: {MARKUP}")}]
    noted = opened(page, say(server, [*changed, *messages[1:]], "told-talk"))
    page.until_text(f"{noted} dl", "told", f"mode: {MARKUP}", "Nothing was computed again.")
    edited = [messages[0], {"role": "user", "content": f"Another question {LONG}"}, *messages[2:]]
    missed = opened(page, say(server, edited, "told-talk"))
    page.until_text(f"{missed} .diff del", "First")
    page.until_text(f"{missed} .diff ins", "Another")
    page.until_text(f"{missed} dl", "message 2, content", "The client changed text that had been sent before")
    page.until_text(f"{missed} .tag", "text changed")
    assert "diverged" not in page.text("#overview")


def opened(page: Browser, answer: dict[str, Any]) -> str:
    """Opens a request's line; how it is found."""
    line = f'#ended details[data-id="{answer["id"]}"]'
    page.press(f"{line} summary")
    return line


# --- text only ---------------------------------------------------------------------------------


def test_what_clients_send_is_shown_as_text(page: Browser, server: Live) -> None:
    tools = [
        {"type": "function", "function": {"name": "read", "description": MARKUP, "parameters": {"type": "object"}}}
    ]
    messages = conversation(server, MARKUP, MARKUP, tools=tools, user=MARKUP)
    messages[1] = {"role": "user", "content": f"{MARKUP} {LONG}"}
    marked = say(server, messages, MARKUP, agent=f"{MARKUP}/1", user=MARKUP, metadata={"x": MARKUP})
    headers = {"User-Agent": "<b>bold</b>", "X-Session-Id": MARKUP, "Accept-Language": MARKUP}
    gone = {"model": MARKUP, "messages": [{"role": "user", "content": MARKUP}]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=gone, headers=headers, timeout=WAIT).status_code == 404
    page.until_text("#ended", f"model='{MARKUP}'", MARKUP)
    page.until_text(f"{opened(page, marked)} .diff ins", "img")
    page.until_text("#conversations", MARKUP)
    page.until_text("#model", f"tiny{MARKUP}")
    page.view("models")
    page.until_text("#models-list", f"tiny{MARKUP}", "loaded")
    page.view("server")
    page.until_text("#settings", f"tiny{MARKUP}")
    assert page.run("return document.querySelectorAll('img, b > b, script:not([src])').length") == 0


# --- try --------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_chat_folds_reasoning_shows_calls_and_stays_in_the_browser(page: Browser, server: Live) -> None:
    page.view("try")
    page.run("document.querySelector('#try-form details').open = true")
    page.one("#try-tools").send_keys("[")
    page.send("Go.")
    page.until_text("#try-told", "Tools are no JSON")
    page.run("document.getElementById('try-tools').value = arguments[0]", json.dumps(TOOLS))
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
    page.send(script(f"<think>\nI look.\n</think>\n\n{call}", f"It says {MARKUP}.").replace("\n", " "))
    page.until_text("#said .call", "read", '"path": "a.py"')
    assert not page.one("#said .reasoning").get_attribute("open")
    page.until_text("#said .reasoning .text", "I look.")
    page.until_text("#try-label", "Result of read")
    page.one("#try-text").send_keys("print(1)" + webdriver.Keys.ENTER)
    page.until_text("#said", "Result", "print(1)", f"It says {MARKUP}.", "tokens/s", "tokens reused")
    page.ended()
    said = page.text("#said .text")
    page.open(server.url)
    page.view("try")
    page.until(lambda: page.text("#said .text") == said, "what was kept")
    page.one("#try-again").click()
    page.until(lambda: page.one("#try-again").is_enabled() and page.text("#said .text") == said, "the same again")
    page.one("#try-clear").click()
    page.until_text("#said", "Ask something.")


# --- models and server ---------------------------------------------------------------------------


def test_a_model_is_kept_and_let_go(page: Browser, server: Live) -> None:
    page.view("models")
    page.until_text("#served", "tiny", "Keep loaded", "Unload")
    page.press("#served button")
    page.until_text("#served", "Let it go")
    assert [card.pinned for card in server.app.service.models.cards() if card.state == "ready"] == [True]
    page.press("#served button")
    page.until_text("#served", "Keep loaded")


@pytest.fixture
def hub(server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in; what is fetched and written lies in folders of this test."""
    folder = checkpoint(tmp_path / "served")
    safetensors(folder / "model.safetensors", 1 << 20)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for place in ("models.library", "api.ops.page", "modelpool.resolve"):
        monkeypatch.setattr(f"start_llm.{place}.FOLDER", tmp_path / "models")
    with running(folder) as found:
        use(monkeypatch, found.url)
        yield found


def enter(field: Any, words: str) -> None:
    field.clear()
    field.send_keys(words + webdriver.Keys.ENTER)


def test_a_model_is_found_fetched_given_values_and_deleted(
    page: Browser, server: Live, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, progress: Any, **more: Any) -> Any:
        while True:
            time.sleep(0.02)
            progress("download", 0.4)

    page.view("models")
    page.until_text("#known", "qwen3.6-27b", "GB")
    enter(page.one("#pull-name"), "model")
    page.until_text("#hits-list", "owner/model", "<b>odd", "7")
    page.press('#hits-list [aria-label="Fetch owner/model"]')
    page.until_text("#pull-told", "owner/model: done.")
    page.until_text("#models-list", "owner/model")
    monkeypatch.setattr(server.app._server.page.pulls, "_fetch", fetch)
    enter(page.one("#pull-name"), "owner/model")
    page.until_text("#pull-told", "40%")
    page.press("#pull-stop")
    page.until_text("#pull-told", "stopped")
    page.one("#pull-go")
    assert page.run("return document.getElementById('pull-drop').hidden"), "a renewal deletes nothing that was here"
    page.press('#models-list [aria-label="Settings of owner/model"]')
    page.one('.own [data-key="context"]').send_keys("4096")
    page.one('.own [data-key="sampling.top_p"]').send_keys(".5")
    page.run("document.querySelector('.own [data-key=thinking]').value = 'false'")
    page.press(".own button.main")
    page.until_text(".own [role=status]", "Saved")
    written = (tmp_path / "models" / "owner--model.toml").read_text()
    assert set(written.split("\n")) == {"", "[sampling]", "context = 4096", "thinking = false", "top_p = 0.5"}
    page.one('.own [data-key="context"]').clear()
    page.one('.own [data-key="context"]').send_keys("5")
    page.press(".own button.main")
    page.until_text(".own [role=status]", "context=5 must be a number of tokens")
    page.press('#models-list [aria-label="Delete owner/model"]')
    page.press('#models-list [aria-label="Keep owner/model"]')
    page.press('#models-list [aria-label="Delete owner/model"]')
    page.press('#models-list [aria-label="Delete owner/model from this disk"]')
    page.until_text("#models-told", "owner/model was deleted", "free again")
    assert not (tmp_path / "hub" / "models--owner--model").exists()
    page.until(lambda: "owner/model" not in page.text("#models-list"), "the list without it")


def test_a_fetch_is_paused_goes_on_and_is_cancelled(
    page: Browser, server: Live, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def fetch(name: str, progress: Any, **more: Any) -> Any:
        more["sized"](2 * 10**9)
        (tmp_path / "hub" / "models--owner--model").mkdir(parents=True, exist_ok=True)
        while not go_on.wait(0.02):
            progress("download", 0.4)
        return Pulled(Path(), 2 * 10**9, 10**9, "0123456789abcdef")

    monkeypatch.setattr(server.app._server.page.pulls, "_fetch", fetch)
    page.view("models")
    page.until_text("#known", "qwen3.6-27b")
    enter(page.one("#pull-name"), "owner/model")
    page.until_text("#pull-told", "owner/model: 40% of 2.0 GB")
    assert page.one("#pull-bar").get_attribute("value") == "0.4"
    page.press("#pull-stop")
    page.until_text("#pull-told", "stopped", "goes on from there")
    page.press("#pull-go")
    page.until_text("#pull-told", "40%")
    page.press("#pull-drop")
    page.until_text("#models-told", "owner/model was deleted")
    assert not (tmp_path / "hub" / "models--owner--model").exists()
    enter(page.one("#pull-name"), "owner/model")
    page.until_text("#pull-told", "40%")
    go_on.set()
    page.until_text("#pull-told", "done", "2.0 GB")
    assert page.run("return [...document.querySelectorAll('#pull-acts button')].every((button) => button.hidden)")


def test_what_cannot_be_found_or_fetched_is_said(page: Browser, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    page.view("models")
    page.until_text("#known", "qwen3.6-27b")
    field = page.one("#pull-name")
    enter(field, "llama3:8b")
    page.until_text("#pull-told", "is a name of Ollama")
    enter(field, f"owner/{MARKUP}")
    page.until_text("#pull-told", MARKUP)
    use(monkeypatch, "http://127.0.0.1:9")
    for words in ("owner/gone", "some words"):
        enter(field, words)
        page.until_text("#pull-told", words, "Hugging Face cannot be reached")


def test_the_log_and_the_settings_are_shown_without_secrets(page: Browser, server: Live) -> None:
    log = logging.getLogger("start_llm.test_browser")
    page.view("server")
    log.error("a line with %s and Bearer abcdefgh12345678", MARKUP)
    page.until_text("#log", f"a line with {MARKUP} and Bearer [redacted]")
    page.until_text("#settings", "MODEL_PATH", "LITELLM_MASTER_KEY", "unset")
    page.until_text("#log .bad", f"a line with {MARKUP}")


# --- shape -------------------------------------------------------------------------------------


def test_390_pixels_are_wide_enough_for_every_view_and_rows_are_cards(page: Browser, server: Live) -> None:
    conversation(server, "a-very-long-name-without-any-place-to-break-it-" * 3)
    page.until_text("#ended", "a-very-long-name")
    page.until_text("#conversations", "a-very-long-name", "ago")
    page.press("#ended details summary")
    cut = "[...document.querySelectorAll('.cards')].filter((e) => e.scrollWidth > e.parentNode.clientWidth).length"
    lefts = "return [...document.querySelectorAll(arguments[0])].map((e) => Math.round(e.getBoundingClientRect().x))"
    with page.wide(390):
        for name in VIEWS:
            page.view(name)
            if name == "server":
                page.until_text("#settings", "MODEL_PATH")
            # Beside its scroll bar, with the longest figures that the meters may have.
            page.run(
                "for (const end of document.querySelectorAll('.meter .end')) end.textContent = '1,023.9 MB, '.repeat(4)"
            )
            *wide, cards = page.run(
                f"return [document.documentElement.scrollWidth, document.documentElement.clientWidth, {cut}]"
            )
            assert wide[0] <= wide[1] <= 390 and cards == 0, (name, wide, cards)
        rows = len(page.all("#settings tr"))
        names, meanings = (page.run(lefts, f"#settings tr > {kind}") for kind in ("th", "td.words"))
        assert names == meanings == names[:1] * rows, "what a setting means stands below its name"


def test_a_view_that_cannot_be_loaded_says_so(page: Browser, server: Live) -> None:
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/try.js*"]})
    try:
        page.open("about:blank")
        page.open(f"{server.url}/#try")
        page.until_text("#try-told", "Reload the page once the server answers")
    finally:
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        page.driver.execute_cdp_cmd("Network.disable", {})


def test_a_page_that_was_left_holds_no_connection(page: Browser, server: Live) -> None:
    """A browser has six to a server: the seventh page would wait until it gives up an earlier one."""
    for _ in range(7):
        page.open("about:blank")
        page.open(server.url)
        page.until_text("#state", "ready")
    feeds = server.app._server._pools["feed"]
    page.until(lambda: feeds._queue.unfinished_tasks == 1, "the end of the feeds of pages that were left")


def test_every_control_is_reached_by_keys_and_has_a_name(page: Browser, server: Live) -> None:
    conversation(server, "key-talk")
    page.until_text("#conversations", "key-talk")
    assert {"#overview", "#try", "#models", "#connect", "#server"} <= set(tabbed(page, 7))
    page.run("[...document.querySelectorAll('#ended summary')].at(-1).focus()")
    assert "icicle" in tabbed(page, 2)
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, textarea, canvas:not([aria-hidden]), svg, [role=img]')]"
        ".filter((e) => !(e.getAttribute('aria-label') || (e.labels && e.labels.length) || e.textContent.trim()))"
        ".map((e) => e.outerHTML)"
    )
    assert nameless == []


def tabbed(page: Browser, times: int) -> list[str]:
    """What the tab key leads to, one after the other."""
    seen = []
    for _ in range(times):
        page.driver.switch_to.active_element.send_keys(webdriver.Keys.TAB)
        seen.append(page.run("const e = document.activeElement; return e.id || e.getAttribute('href') || e.tagName"))
    return seen


def test_arrow_keys_walk_the_tree(page: Browser, server: Live) -> None:
    conversation(server, "walked-talk")
    page.until_text("#conversations", "walked-talk")
    page.press('#conversations button[title="walked-talk"]')
    told = page.until_text("#cache-told", "walked-talk", "in memory", "to compute", "last used")
    tree = page.driver.switch_to.active_element
    tree.send_keys(webdriver.Keys.ARROW_LEFT)
    page.until(lambda: page.text("#cache-told") != told, "another segment")
    for _ in range(10):
        tree.send_keys(webdriver.Keys.ARROW_LEFT)
    page.until_text("#cache-told", "tokens from 0 on")
    tree.send_keys(webdriver.Keys.ENTER)
    page.one("#icicle-out")
    tree.send_keys(webdriver.Keys.ESCAPE)
    page.until(lambda: not page.all("#icicle-out")[0].is_displayed(), "all of it")


# --- 10,000 segments ----------------------------------------------------------------------------


def big_tree(count: int) -> StoredTree:
    """Conversations of ten segments below a common head."""
    segments = [StoredSegment(-1, 2000, 1 << 20, True, 1.0, 9, 2.0)]
    for at in range(1, count):
        parent = 0 if at % 10 == 1 else at - 1
        state = at // 10 % 3
        segments.append(StoredSegment(parent, 300, (1 << 18) * (state == 0), state == 1, float(at), 1, 0.5))
    ends = tuple((f"talk-{at // 10}", at) for at in range(10, count, 10))
    return StoredTree(tuple(segments), ends, 0, 900.0)


def drawing(page: Browser, count: int) -> list[float]:
    """Milliseconds of drawing a tree, by the browser's own clock; the tree comes as the server would send it."""
    return list(
        page.run(
            "const tree = JSON.parse(arguments[0]);"
            "return import('/page/cache.js').then((cache) => { performance.clearMeasures();"
            "for (let time = 0; time < 3; time += 1) cache.take(tree);"
            "return performance.getEntriesByName('icicle').map((entry) => entry.duration).sort((a, b) => a - b); })",
            json.dumps(big_tree(count).as_dict()),
        )
    )


def test_10000_segments_are_drawn_as_quickly_as_their_number_allows(page: Browser, record_property: Any) -> None:
    page.until(lambda: page.run("return document.getElementById('icicle-box') !== null"), "the tree's place")
    small, large = drawing(page, 1000), drawing(page, 10_000)
    record_property("milliseconds", {"1000": small, "10000": large})
    assert len(large) == 3 and large[0] < 60 * max(small[0], 0.5), "no more than its share"
    nodes = page.run("return document.querySelectorAll('#overview *').length")
    assert nodes < 3000, "nothing is an element of its own"
    drawn, told = page.run(
        "performance.clearMeasures(); const canvas = document.getElementById('icicle');"
        "const box = canvas.getBoundingClientRect();"
        "for (let x = 5; x < box.width; x += 5) canvas.dispatchEvent(new PointerEvent('pointermove',"
        "{clientX: box.left + x, clientY: box.top + 10, bubbles: true}));"
        "canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 5, clientY: box.top + 10}));"
        "return [performance.getEntriesByName('icicle').length, document.getElementById('cache-told').textContent]"
    )
    assert drawn == 0, "a pointer's way draws no tree again"
    assert "tokens from 0 on" in told


# --- without a model ----------------------------------------------------------------------------


class Loading(FakeService):
    """A model that is not there yet."""

    def cards(self) -> tuple[Any, ...]:
        return ()

    def health(self) -> Health:
        return Health(False, "loading", detail="The model is still loading.")


def test_it_works_without_a_model_and_asks_for_a_key(window: Browser, tmp_path: Path) -> None:
    settings = Settings(
        _env_file=None,  # type: ignore[call-arg]
        mlx_port=0, log_root=tmp_path / "logs", start_llm_cache_dir=tmp_path / "cache", api_key="open-sesame",
    )  # fmt: skip
    waiting = make_server(settings, Loading())
    waiting.start()
    try:
        window.open(waiting.url)
        field = window.one("#key-text")
        assert not window.all("main")[0].is_displayed()  # it would say that nothing runs
        field.send_keys("wrong" + webdriver.Keys.ENTER)
        window.until_text("#key-wrong", "does not know this key")
        window.one("#key-text").send_keys("open-sesame" + webdriver.Keys.ENTER)
        window.until_text("#state", "loading", "still loading")
        window.until_text("#model", "no model yet")
        for name in VIEWS:
            window.view(name)
        window.until_text("#served", "No model is loaded")
        window.until_text("#settings", "API_KEY", "set, not shown")
        assert "open-sesame" not in window.run("return document.documentElement.outerHTML")
        names = window.run("return [...document.querySelectorAll('#settings th')].map((name) => name.textContent)")
        assert "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS" in names  # a name breaks at its underscores only
        assert window.run("return document.querySelectorAll('#settings th wbr').length") > len(names)
        assert window.complaints("401", "503") == []
        waiting.stop(0)
        window.until_text("#state", "not connected: the server")  # in words of its own, not in the browser's
    finally:
        window.open("about:blank")
        waiting.stop(0)
