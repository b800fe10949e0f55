"""Reads reports saved as JSON, with precise errors for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.text import escape_control
from ampaudit.report.documents import DOCUMENTS, Document, kind_of
from ampaudit.report.model import SCHEMA, Report

__all__ = ["parse_document", "read_document", "read_scan_report"]

_MAX_BYTES = 1 << 30
_HOW = "write one with: ampaudit scan MODEL --format json -o FILE"


def read_scan_report(path: Path, name: str = "") -> Report:
    """Read the report of one scan; ``name`` is used in errors.

    Raises:
        InputError: see ``parse_document``.
    """
    found = parse_document(_text(path, name or str(path)), name or str(path))
    if not isinstance(found, Report):
        raise _not_ours(name or str(path))
    return found


def read_document(path: Path) -> Document:
    """Read the document in a file, or in a converted directory.

    Raises:
        InputError: the file cannot be read; see also ``parse_document``.
    """
    if path.is_dir():
        from ampaudit.checkpoint.layout import MANIFEST, REPORT

        path = path / REPORT if (path / MANIFEST).is_file() else path
    return parse_document(_text(path, str(path)), str(path))


def parse_document(text: str, name: str) -> Document:
    """Parse a document, which errors call ``name``; nothing in it is ever run.

    Raises:
        InputError: it is cut off, of a newer schema, or none of our documents.
    """
    found = _json(text, name)
    schema = found.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(
            f"{name}: written by a newer ampaudit (schema {schema}; this one reads {SCHEMA})",
            hint="update ampaudit, or write the report again with this version",
        )
    kind = kind_of(found)
    if kind is None:
        raise _not_ours(name)
    try:
        return TypeAdapter(DOCUMENTS[kind]).validate_python(found, strict=False)
    except ValidationError as error:
        raise InputError(f"{name}: {_first_fault(error)}", hint=_HOW) from error


def _text(path: Path, name: str) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise InputError(f"{name}: {size:,} bytes is too large for a report", hint=_HOW)
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text, so not a JSON report", hint=_HOW) from error


def _not_ours(name: str) -> InputError:
    return InputError(f"{name}: JSON, but not an ampaudit report that can be used here", hint=_HOW)


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or "Unterminated" in error.msg
        what = "the report is cut off" if cut and text.strip() else "not JSON"
        where = f"{name}:{error.lineno}:{error.colno}"
        raise InputError(
            f"{where}: {what} ({error.msg})", hint="write it again, or copy it whole" if cut else _HOW
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({first_line(error)})", hint=_HOW) from error
    if not isinstance(found, dict):
        raise InputError(f"{name}: JSON, but not an ampaudit report", hint=_HOW)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"not an ampaudit report: {escape_control(where)}: {fault['msg'].lower()}{more}"
