"""The options of ``lint``, and ``[tool.ampaudit.lint]`` in pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ampaudit.core.config import Config, FilePath, Option, Texts
from ampaudit.core.pyproject import read_options


def _of_table(given: Any) -> Any:
    """Return the entries of a table such as ``{"tests/*": ["AMP86"]}`` as on the command line."""
    if not isinstance(given, dict):
        return given
    entries = ((glob, [found] if isinstance(found, str) else found) for glob, found in given.items())
    return [f"{glob}:{','.join(map(str, found))}" for glob, found in entries if isinstance(found, list)]


class LintConfig(Config):
    """Options of ``lint``."""

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
    exclude: Annotated[Texts, Option("Files or directories to skip (repeatable).", metavar="GLOB")] = ()
    gitignore: Annotated[bool, Option("Also lint files that git ignores.", flags=("--no-gitignore",))] = True
    unsafe_fixes: Annotated[bool, Option("Let --fix and --diff also make changes that need a review.")] = (
        False
    )
    baseline: Annotated[
        FilePath | None, Option("JSON report of lint whose findings are left out.", metavar="FILE")
    ] = None
    fail_on: Annotated[
        Literal["error", "warning", "never"], Option("Lowest severity that makes the exit code 1.")
    ] = "warning"


def read_lint_config(path: Path) -> dict[str, Any]:
    """Read the options in a pyproject.toml, by field name.

    Raises:
        UsageError: The file is not valid TOML, or has an invalid key or value.
    """
    return read_options(LintConfig, path, "tool.ampaudit.lint")
