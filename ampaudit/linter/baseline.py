"""Leaves out findings that an earlier report has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import describe_path
from ampaudit.report.finding import KNOWN
from ampaudit.report.lint import LintFinding, LintReport
from ampaudit.report.saved import read_document

__all__ = ["without_baseline"]


def without_baseline(findings: Iterable[LintFinding], path: Path) -> Iterator[LintFinding]:
    """Suppress as many findings of each kind as an earlier report has.

    A finding is found again by its file, function, code and line of source, wherever the line is now.

    Args:
        findings: of all files.
        path: of a report as JSON.

    Raises:
        InputError: it is no report of lint.
    """
    earlier = read_document(path)
    if not isinstance(earlier, LintReport):
        hint = "write one with: ampaudit lint PATHS -o baseline.json"
        raise InputError(f"--baseline {describe_path(path)} is not a report of lint", hint=hint)
    known = Counter(_key(finding) for finding in earlier.active)
    for finding in findings:
        key = _key(finding)
        if finding.suppressed is None and known[key]:
            known[key] -= 1
            yield replace(finding, suppressed=KNOWN)
        else:
            yield finding


def _key(finding: LintFinding) -> tuple[str | int | None, ...]:
    file = os.path.relpath(finding.file).replace(os.sep, "/")
    return file, finding.cell, finding.function, finding.code, " ".join(finding.source.split())
