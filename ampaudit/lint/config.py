"""``[tool.ampaudit.lint]`` in a project's pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampaudit.core.pyproject import LEVEL, TEXTS, Key, checked, read_table

__all__ = ["read_lint_config"]

_TABLE = "tool.ampaudit.lint"
_KEYS: dict[str, Key] = {
    "select": TEXTS,
    "ignore": TEXTS,
    "exclude": TEXTS,
    "fail-on": LEVEL,
}


def read_lint_config(path: Path) -> dict[str, Any]:
    """The table's values, by option name with underscores; empty without the table.

    Raises:
        UsageError: not TOML, or a key or value that ``ampaudit lint`` does not know.
    """
    return checked(path, _TABLE, read_table(path, *_TABLE.split(".")), _KEYS)
