"""A report in any of its formats; each function is imported when its format is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ampaudit.report.bench import BenchReport
from ampaudit.report.check import CheckResults
from ampaudit.report.comparison import Comparison
from ampaudit.report.difference import Differences
from ampaudit.report.documents import Document
from ampaudit.report.lint import LintReport
from ampaudit.report.model import Report
from ampaudit.report.plan import PlanReport
from ampaudit.report.training import TrainingReport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ampaudit.report.conversion import Conversion
    from ampaudit.report.verification import Verification

__all__ = ["as_file", "for_terminal", "is_lines"]


def for_terminal(document: Document, verbosity: int = 0) -> RenderableType:
    """The report for people, as something that rich can print; ``verbosity`` -1 is the verdict alone."""
    if isinstance(document, Comparison):
        from ampaudit.render.comparison_text import render_comparison

        return render_comparison(document.reports)
    if isinstance(document, TrainingReport):
        from ampaudit.render.training_text import render_training

        return render_training(document, verbosity=verbosity)
    if isinstance(document, BenchReport):
        from ampaudit.render.bench_text import render_bench

        return render_bench(document)
    if isinstance(document, PlanReport):
        from ampaudit.render.plan_text import render_plan

        return render_plan(document, layer=None, verbose=verbosity > 0)
    if isinstance(document, CheckResults):
        from ampaudit.render.check_text import render_results

        return render_results(document)
    if isinstance(document, LintReport):
        from ampaudit.render.lint_text import render_lint

        return render_lint(document, verbosity=verbosity)
    if isinstance(document, Report):
        from ampaudit.render.text import render

        return render(document, verbosity=verbosity)
    if isinstance(document, Differences):
        from ampaudit.render.difference_text import render_differences

        return render_differences(document, verbose=verbosity > 0)
    return _of_directory(document, verbosity)


def is_lines(document: Document) -> bool:
    """Whether the text is made of lines that are not to be wrapped."""
    return isinstance(document, LintReport)


def _of_directory(document: Conversion | Verification, verbosity: int) -> RenderableType:
    """What was converted or verified; these modules need torch."""
    from ampaudit.render.conversion_text import render_conversion
    from ampaudit.render.verification_text import render_verification
    from ampaudit.report.conversion import Conversion

    if isinstance(document, Conversion):
        return render_conversion(document)
    return render_verification(document, verbose=verbosity > 0)


def as_file(document: Document, form: str) -> str:
    """The report in a format for machines, browsers or reviews.

    Args:
        document: any report.
        form: a name of ``choice.FORMATS`` other than ``text``.

    Raises:
        UsageError: this kind of report has no such format.
    """
    if form == "json":
        from ampaudit.render.json import to_json

        return to_json(document)
    made: Callable[[Document], str]
    if form == "html":
        from ampaudit.render.html.page import to_html

        made = to_html
    elif form == "markdown":
        from ampaudit.render.markdown import to_markdown

        made = to_markdown
    elif form == "sarif":
        from ampaudit.render.sarif import to_sarif

        made = to_sarif
    elif form == "junit":
        from ampaudit.render.junit import to_junit

        made = to_junit
    elif form == "github":
        from ampaudit.render.github import to_github

        made = to_github
    elif form == "csv":
        from ampaudit.render.csv import to_csv

        made = to_csv
    else:
        raise ValueError(f"no format {form!r}")
    return made(document)
