"""The chat of the page in a real browser: Markdown that may be hostile, files, models, sampling."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.api.common.test_documents import pdf, words
from tests.dashboard.browser import Browser
from tests.dashboard.hostile import HTML, SLOW, SNIPPETS
from tests.images.pictures import png
from tests.integration.live import Live
from tests.lazy import Package
from tests.oracle.oracle import script

webdriver: Any = Package("selenium.webdriver")

ALLOWED = frozenset((
    "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H1", "H2", "H3", "H4", "H5", "H6", "HR", "LI", "OL",
    "P", "PRE", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL",
))  # fmt: skip
ATTRIBUTES = {"href", "align", "start", "target", "rel", "class", "tabindex", "role", "aria-label"}
VENDOR = resources.files("start_llm.dashboard") / "page" / "vendor"

LOOK = """
const [texts, name] = arguments;
return import('/page/markdown.js').then(async (module) => {
  const box = document.createElement('div');
  document.body.append(box);
  for (const text of texts) box.append(module[name](text));
  for (const link of box.querySelectorAll('a')) link.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
  await new Promise((resolve) => setTimeout(resolve, 300));
  const elements = [...box.querySelectorAll('*')];
  const found = {
    tags: [...new Set(elements.map((element) => element.tagName))],
    attributes: [...new Set(elements.filter((e) => !e.closest('.code')).flatMap((e) => e.getAttributeNames()))],
    handlers: elements.flatMap((e) => e.getAttributeNames()).filter((name) => /^on|^style$|^id$|^name$/.test(name)),
    addresses: [...box.querySelectorAll('a[href]')].map((link) => link.getAttribute('href')),
    text: box.textContent,
  };
  box.remove();
  return found;
});
"""


def test_the_vendored_files_are_those_of_their_packages() -> None:
    table = (VENDOR / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S+\.js) \| .* \| ([0-9a-f]{64}) \|$", table, re.M)
    assert sorted(name for name, _ in rows) == sorted(
        item.name for item in VENDOR.iterdir() if item.name.endswith(".js")
    )
    for name, digest in rows:
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        version = re.search(rf"\| {re.escape(name)} \| .* \| ([\d.]+) \|", table)
        assert version is not None and version[1].encode() in content, "the version that the file itself names"
        assert (VENDOR / f"{name.split('.')[0]}.LICENSE").read_text("utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize("wall", ["markdown", "sanitised"])
def test_hostile_answers_run_nothing_and_fetch_nothing(page: Browser, wall: str) -> None:
    """`sanitised`: HTML that reaches the second wall, as if the first one let it through."""
    texts = list(SNIPPETS if wall == "markdown" else HTML)
    assert len(SNIPPETS) >= 200
    found = page.run(LOOK, texts, wall)
    assert set(found["tags"]) <= ALLOWED, found["tags"]
    assert set(found["attributes"]) <= ATTRIBUTES
    assert found["handlers"] == []
    assert all(re.match(r"(?:https?|mailto):", address) for address in found["addresses"]), found["addresses"]
    if wall == "markdown":
        assert "<script>window.pwned=1</script>" in found["text"], "it is shown as the text that it is"
    else:
        page.complaints()  # the policy refuses the handlers while DOMPurify takes them apart
    assert page.run("return typeof window.pwned") == "undefined"


@pytest.mark.thorough
def test_answers_that_are_slow_to_read_are_shown_as_they_are(page: Browser) -> None:
    """Unbounded, the first one takes two minutes, and the fourth one ends in an error."""
    script = (
        "const began = performance.now(); const texts = arguments[0];"
        "return import('/page/markdown.js').then(({ markdown }) => { const shown = texts.map((text) => {"
        "const box = document.createElement('div'); box.append(markdown(text)); return box.textContent.trim(); });"
        "return [shown, (performance.now() - began) / 1000]; })"
    )
    shown, seconds = page.run(script, list(SLOW))
    assert shown[2] == SLOW[2] and shown[3] == SLOW[3], "as plain text"
    assert all(shown) and seconds < 20


@pytest.mark.thorough
def test_an_answer_is_shown_as_markdown_and_its_code_can_be_copied(page: Browser, server: Live) -> None:
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.view("try")
    answer = "## Title\n\n1. **one** `x`\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n<b>bold</b>"
    page.send(script(answer))
    page.until_text("#said .rich h2", "Title")
    page.ended()
    assert page.text("#said .rich strong") == "one" and page.text("#said .rich td") == "1\n2"
    assert page.text("#said .rich .code pre") == "print(1)\n" and "python" in page.text("#said .code p")
    assert "<b>bold</b>" in page.text("#said .rich"), "HTML is shown as text"
    page.press("#said .code button")
    page.until_text("#said .code button", "Copied")
    named = "return document.querySelector('#said .code button').getAttribute('aria-label')"
    page.until(lambda: page.run(named) == "Copy: the python block", "the name that it had")
    assert page.run("return navigator.clipboard.readText()") == "print(1)"


@pytest.mark.thorough
def test_the_model_is_shown_the_text_of_a_pdf(page: Browser, server: Live, tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    page.view("try")
    (tmp_path / "report.pdf").write_bytes(pdf(words("The zebra")))
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4")
    page.all("#try-file")[0].send_keys(str(tmp_path / "report.pdf"))
    page.until_text("#try-files", "report.pdf")
    page.send("What is in it?")
    page.until_text("#said .user", "What is in it?", "report.pdf")
    page.ended()
    page.until_text("#said .assistant", "tokens")
    page.all("#try-file")[0].send_keys(str(tmp_path / "broken.pdf"))
    page.until_text("#try-files", "broken.pdf")
    page.send("And this?")
    page.until_text("#said", "this PDF cannot be shown")


@pytest.mark.thorough
def test_model_sampling_and_files_go_along(page: Browser, server: Live, tmp_path: Path) -> None:
    page.view("try")
    page.until(lambda: len(page.all("#try-model option")) == 2, "the models")
    page.run(
        "const m = document.getElementById('try-model'); m.selectedIndex = 1; m.dispatchEvent(new Event('change'))"
    )
    chosen = page.run("return document.getElementById('try-model').value")
    assert chosen.startswith("tiny")
    page.run(
        "for (const [id, value] of Object.entries(arguments[0])) document.getElementById(id).value = value",
        {"try-top-p": "0.9", "try-seed": "7", "try-most": "40", "try-system": "Be short."},
    )
    (tmp_path / "notes.txt").write_text("a remark of mine")
    (tmp_path / "pixel.png").write_bytes(png())
    (tmp_path / "data.bin").write_bytes(b"\x00\x01")
    page.all("#try-file")[0].send_keys(
        "\n".join(str(tmp_path / name) for name in ("notes.txt", "pixel.png", "data.bin"))
    )
    page.until_text("#try-files", "notes.txt", "pixel.png")
    page.until_text("#try-files-note", "data.bin is neither text nor")
    page.until_text("#try-images-note", "does not see images and is only told that there was one")
    page.listen()
    page.send("What is in it?")
    page.until_text("#said .user", "What is in it?", "notes.txt", "pixel.png")
    page.ended()
    body = page.sent()[0]
    assert {name: body[name] for name in ("model", "top_p", "seed", "max_tokens")} == {
        "model": chosen, "top_p": 0.9, "seed": 7, "max_tokens": 40,
    }  # fmt: skip
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be short."}
    assert "File notes.txt:" in user["content"][0]["text"] and "a remark of mine" in user["content"][0]["text"]
    assert user["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    page.until_text("#said .assistant", "tokens")
    page.press("#try-clear")
    page.until_text("#said", "Ask something.")


@pytest.mark.thorough
def test_a_file_that_is_dropped_joins_the_message(page: Browser) -> None:
    page.view("try")
    page.until(lambda: page.all("#try-model option"), "the chat")
    drop = (
        "const data = new DataTransfer(); data.items.add(new File(['dropped words'], 'drop.md'));"
        "const drop = new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true });"
        "document.getElementById('try-form').dispatchEvent(drop);"
    )
    page.until(lambda: page.run(drop) or page.text("#try-files"), "the file")
    assert "drop.md" in page.text("#try-files")
