"""A mkdocs hook that includes files from outside docs/ in pages, and adapts links to such files.

``<!-- include: DESIGN.md -->`` in a page is replaced by that file of the repository. A link to a
file outside docs/ becomes a link to the repository's website. If the website's address is not
configured (``repo_url``), the link becomes plain text. A link to a file that does not exist causes
a warning, which ``--strict`` turns into an error.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "DESIGN.md": "design.md", "README.md": "index.md"}
"""Files outside docs/, and their pages on the site."""
INCLUDE = re.compile(r"<!-- include: (\S+) -->")
LINK = re.compile(r"(?<!!)\[([^][]+)\]\(([^)\s]+)\)")

log = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text with its includes, and with links that work on the site."""
    folder = (DOCS / page.file.src_uri).parent
    repository = (config.repo_url or "").rstrip("/")
    text = rewrite(markdown, folder, folder, repository, page.file.src_uri)

    def included(found: re.Match[str]) -> str:
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        return rewrite(text, ROOT, folder, repository, found[1])

    return INCLUDE.sub(included, text)


def rewrite(text: str, origin: Path, folder: Path, repository: str, name: str) -> str:
    """Adapt links that were written for a file in ``origin`` to a page in ``folder``."""

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return found[0]

        file = (origin / path).resolve()
        if not file.exists():
            log.warning("%s links to %s, which does not exist", name, target)
            return found[0]

        if file.parent == ROOT and file.name in PAGES:
            file = DOCS / PAGES[file.name]
        if file.is_relative_to(DOCS):
            return f"[{label}]({os.path.relpath(file, folder)}{hash_}{anchor})"

        if repository:
            return f"[{label}]({repository}/blob/main/{file.relative_to(ROOT)})"
        return label

    return LINK.sub(link, text)
