"""Reads and compares reports from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from ampaudit.core.arguments import given_path
from ampaudit.core.config import with_options
from ampaudit.report.compare import DiffConfig, differences
from ampaudit.report.difference import Differences
from ampaudit.report.documents import Document
from ampaudit.report.model import Comparison, Report
from ampaudit.report.saved import read_document

__all__ = ["diff", "read_report"]

Saved = Report | Comparison | str | Path


@with_options(DiffConfig)
def diff(old: Saved, new: Saved, *, config: DiffConfig | None = None, **options: Any) -> Differences:
    """Compare two scan reports: show per layer what got better or worse.

    Args:
        old: a report, or the path of a saved one.
        new: the report to compare with it.
        config: the options as one value.
        **options: fields of ``DiffConfig``, which go before those of ``config``.

    Returns:
        The changes; its ``exit_code`` is 1 if anything is worse.

    Raises:
        UsageError: an option does not fit.
        InputError: one is not a scan report, or they have no policy in common.
    """
    return differences(_read(old), _read(new), DiffConfig.given(config, options))


def read_report(path: str | Path) -> Document:
    """Read a report that was saved as JSON.

    Args:
        path: a JSON file, or a directory written by ``ampaudit convert``.

    Returns:
        The report; its type depends on the command that wrote it.

    Raises:
        InputError: the file is missing, truncated, of a newer schema, or not a report.
    """
    return read_document(given_path(path, "path"))


def _read(report: Any) -> Document:
    return report if isinstance(report, get_args(Document)) else read_report(report)
