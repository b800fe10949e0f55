"""Writes docs/targets.md: `python -m tests.targets.page`."""

from __future__ import annotations

from tests.support.paths import ROOT
from tests.targets.cases import CASES, Case

__all__ = ["page"]

_HEAD = """\
# What you can scan

What `ampaudit scan` gives for what people point it at. `tests/targets/` holds the models and makes
sure that each row is true.

| you have | exit code | `ampaudit scan` gives |
|---|--:|---|
"""


def page() -> str:
    """Return the text of the page."""
    return _HEAD + "".join(_row(case) for case in CASES)


def _row(case: Case) -> str:
    options = f" (`{' '.join(case.options)}`)" if case.options else ""
    return f"| {case.title}{options} | {case.code} | {case.gives} |\n"


if __name__ == "__main__":
    (ROOT / "docs" / "targets.md").write_text(page(), encoding="utf-8")
