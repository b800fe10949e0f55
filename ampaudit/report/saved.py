"""Reads reports saved as JSON, with precise errors for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.untrusted import describe, describe_path, parse_json, read_bounded
from ampaudit.report.documents import DOCUMENTS, Document, kind_of
from ampaudit.report.model import SCHEMA, Report

__all__ = ["parse_document", "read_document", "read_scan_report"]

_MAX_BYTES = 64_000_000  # 60,000 sites
_HOW = "write one with: ampaudit scan MODEL --format json -o FILE"


def read_scan_report(path: Path, name: str = "") -> Report:
    """Read the report of one scan; ``name`` is used in errors.

    Raises:
        InputError: see ``parse_document``.
    """
    found = parse_document(_text(path, name or describe_path(path)), name or describe_path(path))
    if not isinstance(found, Report):
        raise _not_ours(name or describe_path(path))
    return found


def read_document(path: Path) -> Document:
    """Read the document in a file, or in a converted directory.

    Raises:
        InputError: the file cannot be read; see also ``parse_document``.
    """
    if path.is_dir():
        from ampaudit.checkpoint.layout import MANIFEST, REPORT

        path = path / REPORT if (path / MANIFEST).is_file() else path
    return parse_document(_text(path, describe_path(path)), describe_path(path))


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
        return read_bounded(path, _MAX_BYTES, InputError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text, so not a JSON report", hint=_HOW) from error


def _not_ours(name: str) -> InputError:
    return InputError(f"{name}: JSON, but not an ampaudit report that can be used here", hint=_HOW)


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        fault = error.__cause__
        if isinstance(fault, json.JSONDecodeError):
            raise _not_json(text, name, fault) from error
        raise InputError(f"{name}: not JSON ({first_line(error)})", hint=_HOW) from error
    if not isinstance(found, dict):
        raise InputError(f"{name}: JSON, but not an ampaudit report", hint=_HOW)
    return found


def _not_json(text: str, name: str, fault: json.JSONDecodeError) -> InputError:
    cut = fault.pos >= len(text.rstrip()) or "Unterminated" in fault.msg
    what = "the report is cut off" if cut and text.strip() else "not JSON"
    hint = "write it again, or copy it whole" if cut else _HOW
    return InputError(f"{name}:{fault.lineno}:{fault.colno}: {what} ({fault.msg})", hint=hint)


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    where = describe(".".join(str(part) for part in fault["loc"]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"not an ampaudit report: {where}: {describe(fault['msg'].lower())}{more}"
