"""Reads pages: Markdown files with the same five headings each, one per check code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, cast

from ampaudit.core.errors import UsageError, did_you_mean

__all__ = ["LINTED", "Example", "Kind", "Level", "Page", "all_pages", "page_of", "parse_page", "title_of"]

Kind = Literal[
    "overflow",
    "underflow",
    "nan",
    "precision",
    "domain",
    "constant",
    "weights",
    "gradient",
    "performance",
    "uncovered",
    "loop",
]
Level = Literal["error", "warning", "note"]
SECTIONS = ("What it says", "Why it is bad", "Bad example", "Good example", "When to ignore it")
LINTED = "AMP8"  # codes that begin so are found by reading scripts, not by running models
_PLACE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Example:
    """A model file, and the options of the scan that it is an example for (``policy=half``)."""

    code: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """What a check is about.

    Attributes:
        code: such as ``AMP106``; never given to another check.
        title: a few words, as reports print them after the code.
        severity: what its findings normally are; where they matter less on this input, they are notes.
        kind: which family of faults.
        text: the whole page as Markdown.
        bad: a model on which the check fires.
        good: the same model written so that it does not.
    """

    code: str
    title: str
    severity: Level
    kind: Kind
    text: str
    bad: Example
    good: Example


def page_of(code: str) -> Page:
    """The page of a check.

    Raises:
        UsageError: no check has that code.
    """
    pages = all_pages()
    if code.upper() not in pages:
        hint = did_you_mean(code.upper(), pages) or "ampaudit explain lists all codes"
        raise UsageError(f"no check has the code {code!r}", hint=hint)
    return pages[code.upper()]


def title_of(code: str, otherwise: str) -> str:
    """The title of a page; something else where this version has none, as for a later one's code."""
    page = all_pages().get(code)
    return page.title if page is not None else otherwise


@cache
def all_pages() -> Mapping[str, Page]:
    """Every page by code, in order."""
    found = (parse_page(path.read_text(encoding="utf-8")) for path in sorted(_PLACE.glob("AMP*.md")))
    return {page.code: page for page in found}


def parse_page(text: str) -> Page:
    """A page from its Markdown: ``# CODE: title``, ``severity, kind``, then the five sections.

    Raises:
        ValueError: a part is missing or not in its place.
    """
    from markdown_it import MarkdownIt

    tokens = MarkdownIt().parse(text)
    headings = [(t.tag, tokens[i + 1].content) for i, t in enumerate(tokens) if t.type == "heading_open"]
    fences = [token for token in tokens if token.type == "fence"]
    title = headings[0][1]
    if tuple(name for tag, name in headings if tag == "h2") != SECTIONS or len(fences) != 2:
        raise ValueError(f"{title}: a page has the sections {SECTIONS} and two examples")
    code, _, words = title.partition(": ")
    severity, kind = tokens[4].content.split(", ")
    bad, good = (Example(fence.content, _options(fence.info)) for fence in fences)
    return Page(code, words, cast(Level, severity), cast(Kind, kind), text, bad, good)


def _options(info: str) -> dict[str, str]:
    """Of ``python policy=half dtype=bfloat16``."""
    pairs = (word.partition("=") for word in info.split()[1:])
    return {name: value for name, _, value in pairs}
