"""Writes docs/targets.md: `python -m tests.targets.page`."""

from __future__ import annotations

from tests.support.paths import ROOT
from tests.targets.cases import CASES, Case

_HEAD = """\
# What you can scan

What `ampaudit scan` prints for each kind of target. `tests/targets/` contains all of them and checks
the rows.

## What is audited
"""
_REFUSED = """
## What is refused, with the next step

The third column quotes the message or its `next:` line.
"""
_TABLE = """
| you have | options | `ampaudit scan` prints | exit code |
|---|---|---|--:|
"""


def page() -> str:
    """Return the text of the page."""
    audited = "".join(_row(case) for case in CASES if case.code < 2)
    refused = "".join(_row(case) for case in CASES if case.code >= 2)
    return f"{_HEAD}{_TABLE}{audited}{_REFUSED}{_TABLE}{refused}"


def _row(case: Case) -> str:
    options = f"`{' '.join(case.options)}`" if case.options else ""
    return f"| {case.title} | {options} | `{case.gives}` | {case.code} |\n"


if __name__ == "__main__":
    (ROOT / "docs" / "targets.md").write_text(page(), encoding="utf-8")
