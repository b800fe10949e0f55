"""The page of each check: its meaning, why it matters, a bad and a good example, and when to ignore it."""

from __future__ import annotations

from ampaudit.findings.pages.page import Example, Page, all_pages, codes_beginning, page_of, title_of

__all__ = ["Example", "Page", "all_pages", "codes_beginning", "page_of", "title_of"]
