"""The documentation builds as a site: no dead link, no page left out, nothing fetched from elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_site import PAGES
from start_llm.cli.commands import COMMANDS
from start_llm.core.settings import Settings, load_settings

ROOT = Path(__file__).parents[1]
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:|//)|<link\b[^>]*\bstylesheet[^>]*(https?:|//)"
)


SOURCES = ["mkdocs.yml", "scripts/docs_site.py", "docs", *PAGES.values()]


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": ""}
    # Not --quiet: what is not logged is not counted, and a warning then fails nothing.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=250)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run = build(ROOT, folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.mark.live
def test_each_dead_link_is_told_and_fails_the_build(tmp_path: Path) -> None:
    for name in SOURCES:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    with (tmp_path / "docs" / "limits.md").open("a") as page:
        page.write("\n[x](nowhere.md) [x](api.md#nowhere) [x](../README.md#no-such-heading)\n")
    run = build(tmp_path, tmp_path / "site")
    told = "".join(line for line in run.stderr.splitlines() if "limits.md" in line)
    assert run.returncode != 0 and "nowhere.md" in told and "#nowhere" in told and "#no-such-heading" in told, told


@pytest.mark.live
def test_every_page_is_there_and_fetches_nothing(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {name.replace(".md", ".html") for name in PAGES} <= set(pages)
    assert "clients/index.html" in pages and "Each line cost somebody an hour" in pages["lessons.html"]
    assert [name for name, text in pages.items() if _FETCHED.search(text)] == []
    sources = re.findall(r'\b(?:src|srcset)="([^"]+)"', pages["index.html"])
    assert {"images/reuse-light.svg", "images/reuse-dark.svg"} <= set(sources)
    assert [source for source in sources if not (site / source.split("?")[0]).exists()] == []
    assert not any("fonts.googleapis" in text or "fonts.gstatic" in text for text in pages.values())


def test_what_is_fetched_from_elsewhere_would_be_noticed() -> None:
    for tag in ('<link rel="stylesheet" href="https://fonts.example/css">', '<script async src="//cdn.example/x.js">'):
        assert _FETCHED.search(tag)
    assert not _FETCHED.search('<script src="../a.js"><a href="https://example.org">')


def test_what_agents_are_told_is_there() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    names = r"`?((?:docs|start_llm|tests|scripts|\.context)/[\w./]+|[A-Z]+\.md|[\w-]+\.(?:txt|toml|py))"
    paths = re.findall(names, text)
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []


#: Variables of other programs that pages name.
OTHERS = {
    "ANTHROPIC_API_KEY", "CLAUDE_CODE_ATTRIBUTION_HEADER", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN",
    "HTTPS_PROXY", "HTTP_PROXY", "OLLAMA_CONTEXT_LENGTH", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ORACLE_LOG",
    "SSL_CERT_FILE", "START_LLM_HOME", "TRANSFORMERS_NO_ADVISORY_WARNINGS",
}  # fmt: skip


def unknown(text: str) -> set[str]:
    """Commands and settings in `text` that there are none of."""
    commands = set(re.findall(r"start-llm ([a-z]+)", text)) - set(COMMANDS)
    names = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?:=[^`]*)?`", text)) - OTHERS
    return commands | {name for name in names if name.lower() not in Settings.model_fields}


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_pages_name_commands_and_settings_that_there_are(path: Path) -> None:
    text = path.read_text("utf-8")
    assert unknown(text) == set()
    for line in re.findall(r"^export (.*)$", text, re.MULTILINE):
        exported = {name.lower(): value for name, _, value in (word.partition("=") for word in shlex.split(line))}
        assert exported.keys() <= Settings.model_fields.keys()
        load_settings(None, **exported)


def test_a_command_or_setting_that_is_none_is_found() -> None:
    assert unknown("`start-llm commence`, `KV_DISK_MAX_BYTES=1`, `KV_BITS`") == {"commence", "KV_DISK_MAX_BYTES"}
