"""Checks path arguments of the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ampaudit.core.errors import UsageError

__all__ = ["given_path", "given_paths"]


def given_path(value: Any, what: str) -> Path:
    """Return an argument as a path.

    Raises:
        UsageError: The argument is missing, empty or not a path.
    """
    if not isinstance(value, str | Path) or value == "":
        problem = "missing" if value in (None, "") else f"of type {type(value).__name__}"
        raise UsageError(f"{what} is {problem}", hint="pass a path")
    return Path(value)


def given_paths(value: Any, what: str) -> list[str]:
    """Return an argument that is a path or an iterable of paths as a list.

    Raises:
        UsageError: The argument or one of its items is not a path.
    """
    several = [value] if isinstance(value, str | Path) else value
    if not isinstance(several, Iterable) or isinstance(several, Mapping):
        raise UsageError(f"{what} is of type {type(value).__name__}", hint="pass a path or a list of paths")
    return [str(given_path(item, what)) for item in several]
