"""Renders a document as JSON, and its JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from ampaudit.core.text import escape_json
from ampaudit.report.documents import DOCUMENTS

__all__ = ["json_schema", "report_schema_text", "to_json"]


def to_json(value: Any) -> str:
    """Return indented JSON, with fields in the order of the dataclass and a final newline."""
    adapter = TypeAdapter(type(value))
    try:
        return escape_json(adapter.dump_json(value, indent=1).decode()) + "\n"
    except PydanticSerializationError:  # a lone surrogate in a name: not UTF-8, but JSON can escape it
        return json.dumps(adapter.dump_python(value, mode="json"), indent=1) + "\n"


def json_schema(kind: str = "scan") -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind of document."""
    schema = TypeAdapter(DOCUMENTS[kind]).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def report_schema_text() -> str:
    """Return the schema of a scan's report, as in ``docs/report.schema.json``."""
    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"
