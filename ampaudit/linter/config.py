"""The options of ``lint``, and ``[tool.ampaudit.lint]`` in pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from ampaudit.core.config import Config, FilePath, Option, Texts
from ampaudit.core.pyproject import read_options
from ampaudit.report.finding import FailOn

__all__ = ["LintConfig", "read_lint_config"]


def _of_table(given: Any) -> Any:
    """Return the entries of a table such as ``{"tests/*": ["AMP86"]}`` as they are written in a command."""
    if not isinstance(given, dict):
        return given
    entries = ((glob, [found] if isinstance(found, str) else found) for glob, found in given.items())
    return [f"{glob}:{','.join(map(str, found))}" for glob, found in entries if isinstance(found, list)]


class LintConfig(Config):
    """What to lint and what to report."""

    select: Annotated[Texts, Option("Codes or prefixes to enable (repeatable).", metavar="CODES")] = ()
    ignore: Annotated[Texts, Option("Codes or prefixes to disable (repeatable).", metavar="CODES")] = ()
    per_file_ignores: Annotated[
        Texts,
        BeforeValidator(_of_table),
        Option(
            "Codes or prefixes to disable in files (repeatable).",
            metavar="GLOB:CODES",
            accepts="Mapping[str, Sequence[str]] | Sequence[str]",
        ),
    ] = ()
    notes: Annotated[bool, Option("Report notes as well.")] = False
    exclude: Annotated[Texts, Option("Files or directories to skip (repeatable).", metavar="GLOB")] = ()
    gitignore: Annotated[bool, Option("Lint files that git ignores as well.", flags=("--no-gitignore",))] = (
        True
    )
    unsafe_fixes: Annotated[
        bool, Option("Let --fix and --diff make changes as well that should be read before they are kept.")
    ] = False
    baseline: Annotated[
        FilePath | None, Option("Leave out what this JSON report of lint has.", metavar="FILE")
    ] = None
    fail_on: Annotated[FailOn, Option("Lowest severity that makes the exit code 1.")] = "warning"


def read_lint_config(path: Path) -> dict[str, Any]:
    """Read the options in a pyproject.toml, by field name.

    Raises:
        UsageError: not TOML, or a key or value that ``ampaudit lint`` does not know.
    """
    return read_options(LintConfig, path, "tool.ampaudit.lint")
