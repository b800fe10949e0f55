"""The report as JSON, and its JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from ampaudit.report.model import Report

__all__ = ["any_json", "from_json", "json_schema", "to_json"]

_ADAPTER = TypeAdapter(Report)


def to_json(report: Report) -> str:
    """Indented JSON, fields in the order of the schema, a newline at the end."""
    return _ADAPTER.dump_json(report, indent=1).decode() + "\n"


def any_json(value: Any) -> str:
    """A dataclass of the report package as indented JSON, a newline at the end."""
    return TypeAdapter(type(value)).dump_json(value, indent=1).decode() + "\n"


def from_json(text: str) -> Report:
    """The report that ``to_json`` wrote."""
    return _ADAPTER.validate_json(text)


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a report; ``docs/report.schema.json`` is this, written out."""
    schema = _ADAPTER.json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The schema as it stands in the documentation."""
    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"
