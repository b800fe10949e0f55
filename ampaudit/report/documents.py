"""The registry of document kinds: each has a line here and a module in ``views``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.untrusted import describe, describe_path, parse_json, read_bounded
from ampaudit.render.render import check_values
from ampaudit.report.bench import BenchReport
from ampaudit.report.check import Baseline, CheckResults
from ampaudit.report.conversion import Conversion, Verification
from ampaudit.report.difference import Differences
from ampaudit.report.lint import LintReport
from ampaudit.report.model import SCHEMA, Comparison, Report
from ampaudit.report.plan import PlanReport
from ampaudit.report.training import TrainingReport
from ampaudit.report.tuning import TuningReport

T = TypeVar("T")

_MAX_BYTES = 64_000_000  # 60,000 sites
_HOW = "write one with: ampaudit scan MODEL --format json -o FILE"
Document: TypeAlias = (
    Report
    | Comparison
    | PlanReport
    | Conversion
    | Verification
    | CheckResults
    | TrainingReport
    | TuningReport
    | BenchReport
    | LintReport
    | Differences
)
DOCUMENTS: dict[str, type[Document]] = {
    str(field.default): document
    for document in get_args(Document)
    for field in fields(document)
    if field.name == "kind"
}


def json_schema(kind: str = "scan") -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind of document."""
    schema = TypeAdapter(DOCUMENTS[kind]).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def report_schema_text() -> str:
    """Return the schema of a scan's report, as in ``docs/report.schema.json``."""
    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Return the kind of document in parsed JSON; ``None`` if it is not an ampaudit document."""
    return next((kind for kind in DOCUMENTS if kind == data.get("kind")), None)


def read_baseline(path: Path, name: str, how: str) -> Baseline:
    """Read a saved baseline; errors call it ``name``, and their hint is ``how`` to write one.

    Raises:
        InputError: See ``parse_document``.
    """
    data = _json(_text(path, name, how), name, how)
    if data.get("kind") != "baseline":
        raise InputError(f"{name}: JSON, but not a baseline of ampaudit", hint=how)
    return _validated(Baseline, data, name, how)


def read_document(path: Path) -> Document:
    """Read the document in a file, or in a converted directory.

    Raises:
        InputError: The file cannot be read; see also ``parse_document``.
    """
    if path.is_dir():
        from ampaudit.checkpoint import MANIFEST, REPORT

        path = path / REPORT if (path / MANIFEST).is_file() else path
    return parse_document(_text(path, describe_path(path), _HOW), describe_path(path))


def parse_document(text: str, name: str) -> Document:
    """Parse a document without running anything in it; errors call it ``name``.

    Raises:
        InputError: The text is truncated, of a newer schema, or not an ampaudit document.
    """
    data = _json(text, name, _HOW)
    kind = kind_of(data)
    if kind is None:
        raise InputError(f"{name}: JSON, but not an ampaudit report that can be used here", hint=_HOW)
    document = _validated(DOCUMENTS[kind], data, name, _HOW)
    try:
        check_values(document)
    except ValueError as error:
        fault = f"{name}: holds values that no run produces ({describe(first_line(error))})"
        raise InputError(fault, hint=_HOW) from error
    return document


def _validated(record: type[T], data: dict[str, Any], name: str, how: str) -> T:
    try:
        return TypeAdapter(record).validate_python(data, strict=False)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = describe(".".join(str(part) for part in fault["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        what = f"not an ampaudit report: {where}: {describe(fault['msg'].lower())}{more}"
        raise InputError(f"{name}: {what}", hint=how) from error


def _text(path: Path, name: str, how: str) -> str:
    if not os.path.lexists(path):
        raise InputError(f"{name}: No such file", hint=how)
    try:
        return read_bounded(path, _MAX_BYTES, InputError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text, so not a JSON report", hint=how) from error


def _json(text: str, name: str, how: str) -> dict[str, Any]:
    try:
        data = parse_json(text)
    except ValueError as error:
        fault = error.__cause__
        if not isinstance(fault, json.JSONDecodeError):
            raise InputError(f"{name}: not JSON ({first_line(error)})", hint=how) from error
        cut = fault.pos >= len(text.rstrip()) or "Unterminated" in fault.msg
        what = "the report is cut off" if cut and text.strip() else "not JSON"
        raise InputError(
            f"{name}:{fault.lineno}:{fault.colno}: {what} ({fault.msg})",
            hint="write it again, or copy it whole" if cut else how,
        ) from error
    if not isinstance(data, dict):
        raise InputError(f"{name}: JSON, but not an ampaudit report", hint=how)
    schema = data.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(
            f"{name}: written by a newer ampaudit (schema {schema}; this one reads {SCHEMA})",
            hint="update ampaudit, or write the file again with this version",
        )
    return data
