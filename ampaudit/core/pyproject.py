"""Tables of a project's pyproject.toml: found, read, and held against the keys that there are."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ampaudit.core.errors import UsageError, did_you_mean

__all__ = ["LEVEL", "LEVELS", "TEXTS", "Key", "are_texts", "checked", "find_config", "read_table"]

Key: TypeAlias = tuple[Callable[[Any], bool], str]  # whether a value fits, and what it must be


def are_texts(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


TEXTS: Key = (are_texts, "a list of texts")
LEVELS = ("error", "warning", "note", "never")  # what --fail-on may be
LEVEL: Key = (lambda value: value in LEVELS, "error, warning, note or never")


def find_config(start: Path) -> Path | None:
    """The pyproject.toml of a directory or the nearest one above it."""
    for directory in (start, *start.parents):
        if (directory / "pyproject.toml").is_file():
            return directory / "pyproject.toml"
    return None


def read_table(path: Path, *names: str) -> dict[str, Any]:
    """A table, such as ``tool``, ``ampaudit``; empty where there is none.

    Raises:
        UsageError: the file cannot be read, is not TOML, or what has the name is no table.
    """
    try:
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="check the path after --config") from error
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}", hint="correct it") from error
    for depth, name in enumerate(names, 1):
        found = found.get(name, {})
        if not isinstance(found, dict):
            if depth == 1:
                return {}  # somebody else's mistake
            dotted = ".".join(names[:depth])
            raise UsageError(f"{path}: {dotted} is not a table", hint=f"write [{dotted}]")
    return dict(found)


def checked(path: Path, table: str, values: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """The values by key with underscores.

    Raises:
        UsageError: a key that does not exist, or a value that does not fit.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in keys:
            hint = f"{did_you_mean(name, keys)}known keys: {', '.join(keys)}"
            raise UsageError(f"{path}: {table}.{name}: no such key", hint=hint)
        fits, wanted = keys[name]
        if not fits(value):
            raise UsageError(f"{path}: {table}.{name} = {value!r}", hint=f"it must be {wanted}")
        found[name.replace("-", "_")] = value
    return found
