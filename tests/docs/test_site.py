"""Test that the site's navigation lists every page of the docs, and that links point to existing
targets.
"""

import logging
import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def rewrite():
    return runpy.run_path(str(DOCS / "site_links.py"))["rewrite"]


class Loader(yaml.SafeLoader):
    """A YAML loader that reads ``!ENV`` as the list that follows it."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def pages(entry):
    """Return the files named by an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for each in entries for page in pages(each)]


def test_navigation_lists_every_page_once():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    written = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert sorted(pages(config["nav"])) == sorted(str(page.relative_to(DOCS)) for page in written)


def anchors(page):
    """Return the anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", each) for each in words}


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_outside_the_docs_point_to_existing_files_and_headings(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s:#]+)(?:#([^)\s]+))?\)", text)
    missing = [
        (path, anchor)
        for path, anchor in links
        if not (ROOT / path).exists() or (anchor and anchor not in anchors(ROOT / path))
    ]
    assert links and missing == []


def test_link_from_a_page_in_the_root_folder_points_to_the_docs_page(rewrite):
    text = "[glossary](docs/glossary.md#words) and [design](DESIGN.md)"
    assert rewrite(text, ROOT, DOCS, "", "README.md") == (
        "[glossary](glossary.md#words) and [design](design.md)"
    )


def test_link_to_a_file_outside_the_docs_points_to_the_repository_if_the_url_is_known(rewrite):
    text = "[settings](../pyproject.toml)"
    address = "https://example.org/sparrow"
    assert rewrite(text, DOCS, DOCS, address, "vllm.md") == (
        "[settings](https://example.org/sparrow/blob/main/pyproject.toml)"
    )
    assert rewrite(text, DOCS, DOCS, "", "vllm.md") == "settings"


def test_link_to_a_missing_file_logs_a_warning(rewrite, caplog):
    with caplog.at_level(logging.WARNING):
        rewrite("[gone](gone.md)", DOCS, DOCS, "", "vllm.md")
    assert "vllm.md links to gone.md, which does not exist" in caplog.text
