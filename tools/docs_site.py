"""Hooks of MkDocs: generated pages, links into the repository, no other hosts, and a search that finds."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from docs_pages import ELSEWHERE, generated_pages
from docs_search import unanswered

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\(([^)\s#:]+)(?=[#)])")
_FOREIGN = re.compile(
    r"""<(script|img|iframe)\b[^>]*\bsrc=["']?(https?:)?//  # what is fetched when the page opens
    | <link\b[^>]*\brel=["']?(stylesheet|preconnect)\b[^>]*//""",
    re.VERBOSE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and those that are kept outside ``docs/``."""
    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links between files of the repository into links between pages of the site.

    Guides come first in the search, and the pages of checks, of which there are many, last.
    """
    here = page.file.src_uri
    guides = any(section.title == "How-to guides" for section in page.ancestors)
    page.meta["search"] = {"boost": 4.0 if guides else 0.02 if here.startswith("checks/") else 1.0}
    source = ELSEWHERE.get(here, f"docs/{here}")
    page_of = {place: name for name, place in ELSEWHERE.items()}

    def link(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        name = page_of.get(place, place.removeprefix("docs/"))
        known = place in page_of or place.startswith("docs/")
        return f"]({posixpath.relpath(name, posixpath.dirname(here) or '.')}" if known else match[0]

    return _LINK.sub(link, markdown)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Refuse a page that loads anything from another host."""
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site whose search does not lead to the guides."""
    if missed := unanswered(Path(config.site_dir) / "search" / "search_index.json"):
        raise PluginError("the search misses guides:\n" + "\n".join(missed))
