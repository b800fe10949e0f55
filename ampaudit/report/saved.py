"""Reads reports that ampaudit saved as JSON, and says clearly what is wrong with one that it cannot read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.text import escape_control
from ampaudit.report.model import SCHEMA, Report

__all__ = ["parse_saved", "read_report", "read_saved"]

_MAX_BYTES = 1 << 30
_HOW = "write one with: ampaudit scan MODEL --format json -o FILE"
Saved = TypeVar("Saved")
Kinds = Mapping[frozenset[str], Callable[[], type[Saved]]]
REPORT_FIELDS = frozenset({"findings", "coverage", "run"})


def read_report(path: Path, name: str = "") -> Report:
    """The report of one scan; ``name`` is what errors call the file.

    Raises:
        InputError: see ``read_saved``.
    """
    return read_saved(path, {REPORT_FIELDS: lambda: Report}, name)


def read_saved(path: Path, kinds: Kinds[Saved], name: str = "") -> Saved:
    """What a file holds; nothing in it is ever run.

    Args:
        path: of the file.
        kinds: what may be in it, by fields that only it has; the first all of whose fields are there.
        name: what errors call it, if not by its path.

    Raises:
        InputError: it is missing, not text, cut off, of a newer schema, or none of the kinds.
    """
    name = name or str(path)
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise InputError(f"{name}: {size:,} bytes is no report", hint=_HOW)
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}", hint="check the path") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text, so no JSON report", hint=_HOW) from error
    return parse_saved(text, name, kinds)


def parse_saved(text: str, name: str, kinds: Kinds[Saved]) -> Saved:
    """The same of a text.

    Raises:
        InputError: see ``read_saved``.
    """
    found = _json(text, name)
    schema = found.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(
            f"{name}: written by a newer ampaudit (schema {schema}; this one reads {SCHEMA})",
            hint="update ampaudit, or write the report again with this version",
        )
    loader = next((kind for fields, kind in kinds.items() if fields <= found.keys()), None)
    if loader is None:
        raise InputError(f"{name}: JSON, but no report of ampaudit that can be used here", hint=_HOW)
    try:
        return TypeAdapter(loader()).validate_python(found, strict=False)
    except ValidationError as error:
        raise InputError(f"{name}: {_first_fault(error)}", hint=_HOW) from error


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or "Unterminated" in error.msg
        what = "the report is cut off" if cut and text.strip() else "not JSON"
        where = f"{name}:{error.lineno}:{error.colno}"
        raise InputError(f"{where}: {what} ({error.msg})", hint="write it again, or copy it whole") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({first_line(error)})", hint=_HOW) from error
    if not isinstance(found, dict):
        raise InputError(f"{name}: JSON, but no report of ampaudit", hint=_HOW)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"not a report of ampaudit: {escape_control(where)}: {fault['msg'].lower()}{more}"
