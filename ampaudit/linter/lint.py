"""``ampaudit lint``: finds mistakes in training scripts and reports them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampaudit.core import __version__
from ampaudit.core.config import path_arguments, with_options
from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import describe_path
from ampaudit.findings.finding import KNOWN, gate_at
from ampaudit.linter.config import LintConfig
from ampaudit.linter.linting import LintedFile, lint_files
from ampaudit.linter.selection import UNUSED_SUPPRESSION
from ampaudit.report.lint import LintFinding, LintReport


@with_options(LintConfig)
def lint(
    paths: str | Path | Iterable[str | Path] = ".",
    *,
    config: LintConfig | None = None,
    **options: Any,
) -> LintReport:
    """Find mistakes in mixed-precision training loops by reading them; nothing in them is run.

    Args:
        paths: Scripts, notebooks, Markdown, directories or globs.
        config: Options as one record.
        **options: Fields of ``LintConfig``, which override those of ``config``.

    Returns:
        The report, including files that could not be read.

    Raises:
        UsageError: A code does not exist.
    """
    config = LintConfig.merged(config, options)
    names = path_arguments(paths, "paths")
    return lint_report(list(lint_files(names, config)), config)


def lint_report(linted: Sequence[LintedFile], config: LintConfig, *, fixed: int = 0) -> LintReport:
    """Build the report of some linted files, in which ``fixed`` mistakes were repaired.

    Raises:
        InputError: The baseline is not a report of lint.
    """
    every: Iterable[LintFinding] = _all_findings(linted)
    if config.baseline is not None:
        every = without_baseline(every, config.baseline)
    findings = tuple(every)
    severities = [finding.severity for finding in findings if finding.suppressed is None]
    unreadable = sum(not file.was_read for file in linted)
    nothing = 0 < len(linted) <= unreadable
    return LintReport(
        schema=1,
        tool_version=__version__,
        verdict="fail" if nothing else gate_at(severities, "warning"),
        gate="fail" if nothing else gate_at(severities, config.fail_on),
        fail_on=config.fail_on,
        linted=len(linted),
        findings=findings,
        unread=tuple(item for file in linted for item in file.unread),
        fixed=fixed,
        unreadable=unreadable,
    )


def _all_findings(linted: Sequence[LintedFile]) -> Iterator[LintFinding]:
    """Yield the findings of each file, with those that show only where another file imports it."""
    by_file: dict[str, list[LintFinding]] = {}
    for file in linted:
        for finding in file.imported:
            by_file.setdefault(finding.file, []).append(finding)
    for file in linted:
        more = by_file.get(file.path, []) if file.after == file.before else []  # lines may have moved
        yield from _with_imported(file.findings, more) if more else file.findings


def _with_imported(findings: list[LintFinding], more: list[LintFinding]) -> list[LintFinding]:
    merged = {(item.code, item.line, item.column): item for item in more}
    for item in findings:
        key = (item.code, item.line, item.column)
        if key not in merged or merged[key].severity == item.severity:
            merged[key] = item
    hidden = {line for item in more if item.suppressed for line in (item.line, item.end_line)}
    remaining = (
        item for item in merged.values() if item.code != UNUSED_SUPPRESSION or item.line not in hidden
    )
    return sorted(remaining, key=lambda item: (item.line, item.column, item.code))


def without_baseline(findings: Iterable[LintFinding], path: Path) -> Iterator[LintFinding]:
    """Suppress as many findings of each kind as an earlier report has.

    Findings are matched by file, function, code and source, whatever their line numbers are now.

    Args:
        findings: Findings of all files.
        path: JSON report of an earlier run.

    Raises:
        InputError: The file is not a report of lint.
    """
    from ampaudit.report.documents import read_document

    earlier = read_document(path)
    if not isinstance(earlier, LintReport):
        hint = "write one with: ampaudit lint PATHS -o baseline.json"
        raise InputError(f"--baseline {describe_path(path)} is not a report of lint", hint=hint)
    remaining = Counter(_key(finding) for finding in earlier.active)
    for finding in findings:
        key = _key(finding)
        if finding.suppressed is None and remaining[key]:
            remaining[key] -= 1
            yield replace(finding, suppressed=KNOWN)
        else:
            yield finding


def _key(finding: LintFinding) -> tuple[str | int | None, ...]:
    file = os.path.relpath(finding.file).replace(os.sep, "/")
    return file, finding.cell, finding.function, finding.code, " ".join(finding.source.split())
