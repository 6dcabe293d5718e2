"""A hook of mkdocs: pages of the site that lie elsewhere in the repository, where people and agents look for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "index.md": "README.md",
    "lessons.md": ".context/LESSONS.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
_LINK = re.compile(r"\]\(docs/?([^)]*)\)")
_IMAGE = re.compile(r'\b(src|srcset)="docs/')
_TOP = "|".join(map(re.escape, PAGES.values()))
_NAMES = {source: name for name, source in PAGES.items()}


def page(text: str) -> str:
    """`text` of a page at the repository's top, with its links as they are from inside ``docs``."""
    return _LINK.sub(lambda link: f"]({_target(link[1])})", _IMAGE.sub(r'\1="', linked(text, 0)))


def linked(text: str, depth: int) -> str:
    """`text` with links to the pages of the repository's top as the site has them.

    Args:
        depth: how many folders below the repository's top the text lies.
    """
    link = re.compile(rf"\]\({re.escape('../' * depth)}({_TOP})(#[^)]*)?\)")
    return link.sub(lambda found: f"]({'../' * (depth - 1)}{_NAMES[found[1]]}{found[2] or ''})", text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of ``docs`` lead somewhere on the site, too; people follow them in the repository."""
    return linked(markdown, page.file.src_uri.count("/") + 1)


def _target(path: str) -> str:
    return f"{path.rstrip('/')}/README.md" if path and not re.search(r"\.\w+(#.*)?$", path) else path


def on_files(files: Files, config: Any) -> Files:
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=page(text)))
    return files
