"""The page of each check: what it says, why that is bad, a bad and a good example, when to ignore it."""

from __future__ import annotations

from ampaudit.report.pages.page import Example, Page, all_pages, page_of, title_of

__all__ = ["Example", "Page", "all_pages", "page_of", "title_of"]
