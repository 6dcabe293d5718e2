"""Conversations of the page's chat in a real browser: kept, found, edited, branched, moved to files, broken off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import MARKUP, Browser
from tests.integration.live import Live
from tests.lazy import Package
from tests.oracle.oracle import script

webdriver: Any = Package("selenium.webdriver")
pytestmark = pytest.mark.thorough

LONG = "[[long 40]]"  # enough words to prove a conversation by


def ask(page: Browser, text: str, answer: str) -> None:
    page.send(f"{text} {script(answer)}")
    page.until_text("#said .assistant:last-child", answer)
    page.ended()


def titles(page: Browser) -> list[str]:
    return page.text("#chats-list li").split("\n")


def again(page: Browser, server: Live) -> None:
    """The page as it is when it is loaded anew."""
    page.open(server.url)
    page.view("try")


@pytest.mark.live
def test_chats_are_kept_listed_found_renamed_and_deleted(page: Browser, server: Live) -> None:
    page.view("try")
    ask(page, "Of cats.", "They purr.")
    page.press("#try-clear")
    page.until_text("#said", "Ask something.")
    ask(page, f"Of dogs {MARKUP}.", "They bark.")
    assert [title[:7] for title in titles(page)] == ["Of dogs", "Of cats"]
    again(page, server)
    page.until_text("#said", "They bark.")
    page.one("#chats-search").send_keys("PURR cats")
    page.until(lambda: titles(page)[0].startswith("Of cats") and len(titles(page)) == 1, "what was found")
    page.until_text("#chats-told", "1 found")
    page.one("#chats-search").send_keys(webdriver.Keys.ARROW_DOWN)
    page.driver.switch_to.active_element.send_keys(webdriver.Keys.ENTER)
    page.until_text("#said", "They purr.")
    page.press("#chat-rename")
    page.driver.switch_to.active_element.send_keys("Felines" + webdriver.Keys.ENTER)
    page.run("const s = document.getElementById('chats-search'); s.value = ''; s.dispatchEvent(new Event('input'))")
    page.until(lambda: "Felines" in titles(page), "the new name")
    page.press("#chat-delete")
    page.until_text("#chats-undo", "“Felines” was deleted.")
    page.until(lambda: len(titles(page)) == 1, "a shorter list")
    page.until_text("#said", "They bark.")
    page.driver.switch_to.active_element.send_keys(webdriver.Keys.ENTER)  # Undo has the focus
    page.until(lambda: len(titles(page)) == 2, "what came back")
    page.until_text("#said", "They purr.")
    page.press("#chat-delete")
    page.until_text("#chats-undo", "was deleted")
    again(page, server)
    assert [title[:7] for title in titles(page)] == ["Of dogs"]


def test_an_edit_and_another_answer_are_branches_that_share_what_is_stored(page: Browser, server: Live) -> None:
    page.view("try")
    page.send(f"First. {LONG} {'words of mine ' * 60}")
    page.ended()
    ask(page, "Second.", "Two.")
    page.until_text("#said .assistant:last-child .acts", "tokens reused")
    page.press("#said .user:nth-child(3) .acts button")
    field = page.driver.switch_to.active_element
    field.clear()
    field.send_keys(f"Other. {script('Three.')}" + webdriver.Keys.CONTROL + webdriver.Keys.ENTER)
    page.until_text("#said .assistant:last-child", "Three.")
    page.ended()
    told = page.text("#said .assistant:last-child .acts")
    reused, prompt = (
        int(part.split(" ")[-1].replace(",", "")) for part in told.split(" tokens reused")[0].split(" of ")
    )
    assert prompt > 200 and reused > 0.8 * (prompt - 40), told
    page.until_text("#said .user:nth-child(3)", "2 of 2")
    page.press("#said .user:nth-child(3) .branches button")
    page.until_text("#said", "Two.", "1 of 2")
    assert "Three." not in page.text("#said")
    page.press("#try-again")
    page.until_text("#said .assistant:last-child", "2 of 2")
    again(page, server)
    page.until_text("#said .assistant:last-child", "2 of 2", "Two.")
    page.press("#said .user:nth-child(3) .branches button:last-child")
    page.until_text("#said", "Three.")


def test_an_answer_can_be_edited_and_the_model_is_told_what_stands_there(page: Browser, server: Live) -> None:
    page.view("try")
    ask(page, "Say it.", "Wrong words.")
    page.press('#said button[aria-label="Edit this answer"]')
    field = page.driver.switch_to.active_element
    field.clear()
    field.send_keys("Right words.")
    page.press(".editor button.main")
    page.until_text("#said .assistant", "Right words.", "edited")
    page.listen()
    ask(page, "Go on.", "Yes.")
    assert [message["content"] for message in page.sent()[0]["messages"]][1] == "Right words."


def test_reading_is_told_before_the_first_word(page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    page.view("try")
    monkeypatch.setenv("ORACLE_SLEEP_PER_TOKEN", "0.005")
    page.send("words to be read " * 600 + script("Read."))
    page.until_text("#said .coming", "reading", " of ", "tokens, about")
    monkeypatch.delenv("ORACLE_SLEEP_PER_TOKEN")
    page.until_text("#said .assistant", "Read.")
    page.ended()


def test_a_failure_has_retry_and_stop_keeps_what_was_said(
    page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.view("try")
    page.run(
        "window.kept = window.fetch;"
        "window.fetch = (path, more) => path.includes('completions')"
        "? Promise.reject(new window.TypeError('x')) : window.kept(path, more)"
    )
    page.send(f"Ask. {script('Here.')}")
    page.until_text("#said .assistant", "broke off: the server does not answer", "Retry")
    page.run("window.fetch = window.kept")
    page.press("#said .retry")
    page.until_text("#said .assistant", "Here.")
    page.ended()
    assert not page.all("#said .branches"), "an empty failure is no branch"
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.05")
    page.send("More [[long 5000]]")
    page.until_text("#said .coming", "tokens/s")
    page.press("#try-stop")
    page.until_text("#said .assistant:last-child", "stopped", "Retry")
    page.until(lambda: server.app.engine.status().running == 0, "the end of the work")
    monkeypatch.delenv("ORACLE_SLEEP_PER_STEP")
    kept = page.text("#said .assistant:last-child .text")
    again(page, server)
    assert kept and page.text("#said .assistant:last-child .text") == kept


KEPT = """
return new Promise((done) => {
  const opened = indexedDB.open('start_llm');
  opened.onsuccess = () => {
    const rows = opened.result.transaction('messages').objectStore('messages').getAll();
    rows.onsuccess = () => {
      opened.result.close();
      done(rows.result.some((row) => row.role === 'assistant' && row.content.length > 20));
    };
  };
});
"""
"""Whether an answer's first words are kept. (A test that imports a module of the page runs it anew in Firefox.)"""


def test_who_reloads_in_the_middle_of_an_answer_keeps_what_had_come(
    page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.view("try")
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.05")
    page.send("More [[long 5000]]")
    page.until(lambda: len(page.text("#said .coming .text")) > 40, "some words")
    page.until(lambda: page.run(KEPT), "that it is kept")
    again(page, server)
    page.until_text("#said .assistant", "broke off: the page was left", "Retry")
    assert len(page.text("#said .assistant .text")) > 20
    monkeypatch.delenv("ORACLE_SLEEP_PER_STEP")
    page.until(lambda: server.app.engine.status().running == 0, "the end of the work")


def test_who_scrolls_up_is_not_taken_along(page: Browser, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    page.view("try")
    page.send(script("\n\n".join(f"Line {number}." for number in range(80))))
    page.until_text("#said .assistant", "Line 79.")
    page.ended()
    place = "const b = document.getElementById('said'); return [b.scrollTop, b.scrollHeight - b.clientHeight]"
    page.until(lambda: (now := page.run(place)) and now[1] - now[0] < 60 < now[1], "the end")
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.02")
    page.send("More [[long 5000]]")
    page.until_text("#said .coming", "tokens/s")
    page.run("document.getElementById('said').scrollTop = 10")
    had = len(page.text("#said .coming .text"))
    page.until(lambda: len(page.text("#said .coming .text")) > had + 60, "more words")
    assert page.run(place)[0] == 10
    page.press("#try-stop")
    monkeypatch.delenv("ORACLE_SLEEP_PER_STEP")
    page.ended()
    assert page.run(place)[0] == 10


def test_two_tabs_lose_nothing_of_one_conversation(page: Browser, server: Live) -> None:
    page.view("try")
    ask(page, "Begin.", "Begun.")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    try:
        again(page, server)
        page.until_text("#said", "Begun.")
        ask(page, "From the second tab.", "Second.")
        page.driver.switch_to.window(first)
        page.until_text("#said", "From the second tab.", "Second.")
        ask(page, "From the first tab.", "First.")
        second = next(handle for handle in page.driver.window_handles if handle != first)
        page.driver.switch_to.window(second)
        page.until_text("#said", "Second.", "First.")
        page.press("#chat-delete")
        page.driver.switch_to.window(first)
        page.until_text("#said", "Ask something.")
        page.driver.switch_to.window(second)
    finally:
        if page.driver.current_window_handle != first:
            page.driver.close()
        page.driver.switch_to.window(first)


# --- files ------------------------------------------------------------------------------------

MOVED = """
return import('/page/portable.js').then(async (portable) => {
  const chats = await import('/page/chats.js');
  if (!chats.listed().length) await chats.openChats();  // Firefox reads modules anew for a test
  const [chat] = chats.listed();
  const messages = await chats.messagesOf(chat);
  const texts = { json: portable.toJson([[chat, messages]]), markdown: portable.toMarkdown(chat, messages) };
  const short = ([back, rows]) => [back.title, rows.map((row) => [row.role, row.content, row.reasoning_content || ""])];
  return [texts, Object.values(texts).map((text) => portable.fromFile(text).map(short))];
});
"""


def test_a_chat_goes_to_json_and_markdown_and_comes_back(page: Browser, server: Live, tmp_path: Path) -> None:
    page.view("try")
    hostile = f"<!-- user -->\n\\<!-- tool -->\n{MARKUP}"
    ask(page, "Say.", "One.")
    page.send(script(f"<think>\nI look.\n</think>\n\nTwo.\n{hostile}"))
    page.until_text("#said .assistant:last-child .text", "Two.")
    page.ended()
    assert page.one("#chats summary").text == "Export, import"
    texts, back = page.run(MOVED)
    as_json, as_markdown = (found[0][1] for found in back)
    assert as_json == as_markdown and [role for role, *_ in as_json] == ["user", "assistant"] * 2
    assert as_json[3][1].endswith(hostile) and as_json[3][2].strip() == "I look."
    for name in ("json", "markdown"):
        (tmp_path / f"kept.{name}").write_text(texts[name], "utf-8")
    (tmp_path / "odd.json").write_text('{"format": "other"}')
    page.all("#chats-file")[0].send_keys(str(tmp_path / "kept.json"))
    page.until(lambda: len(titles(page)) == 2, "what was imported")
    page.all("#chats-file")[0].send_keys(str(tmp_path / "kept.markdown"))
    page.until(lambda: len(titles(page)) == 3, "what was imported")
    page.until_text("#said", "Two.", MARKUP)
    ask(page, "Go on here.", "Three.")
    page.all("#chats-file")[0].send_keys(str(tmp_path / "odd.json"))
    page.until_text("#chats-note", "odd.json was not imported", "neither an export")


def test_a_hostile_file_brings_text_only(page: Browser, server: Live, tmp_path: Path) -> None:
    message = {"id": "a", "parent": "a", "role": "assistant", "content": MARKUP, "told": MARKUP, "state": MARKUP}
    message |= {"tool_calls": [{"function": {"name": MARKUP, "arguments": MARKUP}}, None], "reasoning_content": MARKUP}
    scripted = {"name": "x", "image": "javascript:window.pwned=1"}
    message |= {"files": [{"name": MARKUP, "size": MARKUP, "text": MARKUP}, scripted, 7]}
    messages = [message, 5, {"role": "root", "content": "x"}]
    chats = [{"title": MARKUP, "head": "a", "messages": messages, "settings": {"system": 5}}, None]
    (tmp_path / "bad.json").write_text(json.dumps({"format": "start_llm chats", "chats": chats}))
    page.view("try")
    page.all("#chats-file")[0].send_keys(str(tmp_path / "bad.json"))
    page.until_text("#said .assistant", MARKUP)
    page.until_text("#chats-list", MARKUP)
    assert len(page.all("#said .chip")) == 1 == len(page.all("#said .assistant"))


# --- many ---------------------------------------------------------------------------------------

FILL = """
const done = arguments[arguments.length - 1];
import('/page/chats.js').then(async (chats) => {
  for (let at = 0; at < 500; at += 1) {
    const chat = { ...chats.newChat(), title: `Chat ${at}`, named: true, updated: 1e12 + at };
    const said = Array.from({ length: 100 }, (_, turn) => ({ role: turn % 2 ? 'assistant' : 'user',
      content: `message ${turn} of chat ${at} ` + 'some words of an answer '.repeat(12)
        + (at === 77 && turn === 50 ? 'quince' : '') }));
    await chats.keepChat(chat, chats.chained(chat, said));
  }
  done();
});
"""
MEASURE = """
const done = arguments[arguments.length - 1];
import('/page/chatlist.js').then(async ({ showList }) => {
  const field = document.getElementById('chats-search');
  const timed = async (text) => {
    field.value = text;
    const began = performance.now();
    await showList();
    document.getElementById('chats-list').getBoundingClientRect();
    return [performance.now() - began, document.querySelectorAll('#chats-list li').length];
  };
  const found = {};
  const wanted = { list: '', first: 'quince', search: 'quince', none: 'zzz', all: 'answer words' };
  for (const [name, text] of Object.entries(wanted)) found[name] = await timed(text);
  done(found);
});
"""


@pytest.mark.slow
def test_500_chats_of_100_messages_are_listed_and_searched(page: Browser, server: Live, record_property: Any) -> None:
    page.view("try")
    page.driver.execute_async_script(FILL)
    again(page, server)
    page.until(lambda: len(titles(page)) == 500, "the list")
    found = page.driver.execute_async_script(MEASURE)
    record_property("milliseconds", found)
    print("milliseconds, rows:", found)
    assert [found[name][1] for name in ("list", "first", "search", "none", "all")] == [500, 1, 1, 0, 500]
    assert found["search"][0] < 20 * max(found["none"][0], 5)
    page.until_text("#said", "message 99 of chat 499")
