"""The pages of lints, and those whose mistake is repaired."""

from __future__ import annotations

from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["PAGES", "REPAIRED"]


PAGES = {code: page for code, page in all_pages().items() if code.startswith(LINTED)}


REPAIRED = frozenset(
    "AMP802 AMP803 AMP804 AMP807 AMP809 AMP817 AMP818 AMP819 AMP820 AMP836 AMP840 AMP841 AMP844 AMP850"
    " AMP860 AMP864".split()
)
