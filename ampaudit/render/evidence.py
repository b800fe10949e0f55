"""A finding's numbers and lines in words: the same in a terminal, in a review and in a browser."""

from __future__ import annotations

import os
from pathlib import Path

from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_control, format_number
from ampaudit.report.finding import Finding, Source, Trial
from ampaudit.report.model import RunInfo
from ampaudit.report.pages import all_pages

__all__ = [
    "evidence_text",
    "evident_line",
    "poisons_text",
    "ran_on",
    "relative_path",
    "title_of",
    "trial_text",
]

_POISONS_SHOWN = 3
_INSTALLED = "site-packages/"


def evidence_text(finding: Finding) -> str:
    """Peak against limit, headroom, and how many elements broke; empty where there are no numbers."""
    seen = finding.evidence
    parts: list[str] = []
    if seen.peak is not None and seen.limit is not None:
        parts.append(f"peak {format_number(seen.peak)}, limit {format_number(seen.limit)}")
    if seen.headroom_bits is not None:
        parts.append(f"headroom {seen.headroom_bits:+.2f} bits")
    for count, name in ((seen.inf, "inf"), (seen.nan, "NaN")):
        if count:
            parts.append(f"{count} of {seen.elements} elements became {name}")
    return "; ".join(parts)


def ran_on(run: RunInfo) -> str:
    """How many batches ran, and where; or that nothing did."""
    if run.level == "static":
        return "nothing was run"
    return f"{run.batches} batch{'es' if run.batches != 1 else ''} on {run.device} ({run.backend})"


def title_of(code: str, otherwise: str) -> str:
    """The title of a page; something else where this version has none, as for a later one's code."""
    page = all_pages().get(code)
    return page.title if page is not None else otherwise


def poisons_text(finding: Finding) -> str:
    """How many later sites a finding poisons, and the first of them."""
    poisons = finding.poisons
    shown = ", ".join(escape_control(site) for site in poisons[:_POISONS_SHOWN])
    more = len(poisons) - _POISONS_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"poisons {len(poisons)} later site{'s' if len(poisons) != 1 else ''}: {shown}{rest}"


def evident_line(source: Source | None) -> SourceLine | None:
    """The line to show in somebody's own project: the caller where the value is made inside a library."""
    if source is None:
        return None
    if source.caller is not None and _INSTALLED in source.file:
        return source.caller
    return SourceLine(source.file, source.line, source.code)


def relative_path(file: str) -> str:
    """Below the working directory, or from the package's directory on, or as it is."""
    _, packages, inside = file.rpartition(_INSTALLED)
    if packages:
        return inside
    relative = os.path.relpath(file, Path.cwd())
    return file if relative.startswith("..") else relative


def trial_text(trial: Trial) -> str:
    """What to do; where it is no cure, what it leaves."""
    if trial.outcome == "cure":
        return trial.change
    are = "1 error is" if trial.left == 1 else f"{trial.left} errors are"
    return f"{trial.change}; fixes this finding, {are} left elsewhere"
