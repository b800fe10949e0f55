"""The options of ``lint``, and ``[tool.ampaudit.lint]`` in pyproject.toml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from ampaudit.core.config import Config, Option, Texts
from ampaudit.core.pyproject import read_options
from ampaudit.report.finding import FailOn

__all__ = ["LintConfig", "LintOptions", "read_lint_config"]


class LintConfig(Config):
    """What to lint and what to report."""

    select: Annotated[Texts, Option("Codes or prefixes to enable (repeatable).", metavar="CODES")] = ()
    ignore: Annotated[Texts, Option("Codes or prefixes to disable (repeatable).", metavar="CODES")] = ()
    exclude: Annotated[Texts, Option("Files or directories to skip (repeatable).", metavar="GLOB")] = ()
    fail_on: Annotated[FailOn, Option("Lowest severity that makes the exit code 1.")] = "warning"


class LintOptions(TypedDict, total=False):
    """The fields of ``LintConfig`` as keywords."""

    select: Sequence[str]
    ignore: Sequence[str]
    exclude: Sequence[str]
    fail_on: FailOn


def read_lint_config(path: Path) -> dict[str, Any]:
    """Read the options in a pyproject.toml, by field name.

    Raises:
        UsageError: not TOML, or a key or value that ``ampaudit lint`` does not know.
    """
    return read_options(LintConfig, path, "tool.ampaudit.lint")
