"""MkDocs hooks: add generated pages, rewrite links to files, and check for other hosts and for the search."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from docs_pages import OUTSIDE_DOCS, generated_pages
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
    """Add the generated pages, and those whose file is outside ``docs/``."""
    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links between files of the repository into links between pages of the site.

    Also set the page's rank in the search: guides first, and the many pages of checks last.
    """
    here = page.file.src_uri
    guides = any(section.title == "How-to guides" for section in page.ancestors)
    page.meta["search"] = {"boost": 4.0 if guides else 0.02 if here.startswith("checks/") else 1.0}
    source = OUTSIDE_DOCS.get(here, f"docs/{here}")
    page_of = {file: name for name, file in OUTSIDE_DOCS.items()}

    def link(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        name = page_of.get(file, file.removeprefix("docs/"))
        has_page = file in page_of or file.startswith("docs/")
        return f"]({posixpath.relpath(name, posixpath.dirname(here) or '.')}" if has_page else match[0]

    return _LINK.sub(link, markdown)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Fail if a page loads anything from another host."""
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if the site's search does not lead to the guides."""
    if missed := unanswered(Path(config.site_dir) / "search" / "search_index.json"):
        raise PluginError("the search misses guides:\n" + "\n".join(missed))
