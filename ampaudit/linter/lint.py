"""``ampaudit lint``: training scripts in, mistakes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Unpack

from ampaudit.core.arguments import given_paths
from ampaudit.core.version import __version__
from ampaudit.linter.config import LintConfig, LintOptions
from ampaudit.linter.linting import LintedFile, RuleSelection, lint_files
from ampaudit.report.finding import FailOn
from ampaudit.report.lint import LintReport

__all__ = ["lint", "lint_report"]


def lint(
    paths: str | Path | Iterable[str | Path] = ".",
    *,
    config: LintConfig | None = None,
    **options: Unpack[LintOptions],
) -> LintReport:
    """Find mistakes in mixed-precision training loops by reading them; nothing in them is run.

    Args:
        paths: scripts, notebooks, Markdown, directories or globs.
        config: the options as one record.
        **options: fields of ``LintConfig``, which override those of ``config``.

    Returns:
        The report, including files that could not be read.

    Raises:
        UsageError: a code does not exist.
    """
    chosen = LintConfig.given(config, options)
    asked = given_paths(paths, "paths")
    selection = RuleSelection.parse(chosen.select, chosen.ignore)
    linted = list(lint_files(asked, selection, exclude=chosen.exclude))
    return lint_report(linted, chosen.fail_on)


def lint_report(linted: Sequence[LintedFile], fail_on: FailOn, *, fixed: int = 0) -> LintReport:
    """Put the report of some files together; ``fixed`` mistakes were repaired in them."""
    return LintReport(
        schema=1,
        tool_version=__version__,
        fail_on=fail_on,
        linted=len(linted),
        findings=tuple(finding for file in linted for finding in file.findings),
        unread=tuple(item for file in linted for item in file.unread),
        fixed=fixed,
    )
