"""Finds, reads and validates the tables of pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ampaudit.core.config import Config, no_such, option_of, value_type
from ampaudit.core.errors import UsageError
from ampaudit.core.untrusted import describe, read_bounded

_MAX_BYTES = 10_000_000


def find_config() -> Path | None:
    """Return the pyproject.toml of the current directory or of its nearest parent that has one."""
    folder = Path.cwd()
    places = (directory / "pyproject.toml" for directory in (folder, *folder.parents))
    return next(filter(Path.is_file, places), None)


def read_options(
    record: type[Config], path: Path, table: str, tables: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read a command's options from a table such as ``tool.ampaudit``, by field name; empty if there is none.

    Keys are the names of the record's fields with hyphens, and nested ``tables`` are ignored. Paths are
    relative to the file's directory.

    Raises:
        UsageError: The file cannot be read, a key is unknown, or a value is invalid.
    """
    fields = {
        name.replace("_", "-"): name
        for name, field in record.model_fields.items()
        if (option := option_of(field)) and option.file
    }
    values: dict[str, Any] = {}
    for key, value in _table(path, table).items():
        if key in tables:
            continue
        if key not in fields:
            raise no_such("key", key, f"{path}: {table}.", list(fields))
        is_path = value_type(record.model_fields[fields[key]]) is Path and isinstance(value, str)
        values[fields[key]] = path.parent / value if is_path else value
    options = record.read(values, f"{path}: {table}.")
    return {name: getattr(options, name) for name in values}


def _table(path: Path, table: str) -> dict[str, Any]:
    try:
        value: Any = tomllib.loads(read_bounded(path, _MAX_BYTES, UsageError).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {describe(error)}", hint="correct it") from error
    names = table.split(".")
    for depth, name in enumerate(names, 1):
        value = value.get(name, {})
        if not isinstance(value, dict):
            if depth == 1:
                return {}  # a mistake that other tools report
            dotted = ".".join(names[:depth])
            raise UsageError(f"{path}: {dotted} is not a table", hint=f"write [{dotted}]")
    return dict(value)
