"""A document as JSON, and its JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from ampaudit.report.documents import DOCUMENTS
from ampaudit.report.model import Report

__all__ = ["from_json", "json_schema", "schema_text", "to_json"]


def to_json(value: Any) -> str:
    """Indented JSON, fields in the order of the dataclass, a newline at the end."""
    adapter = TypeAdapter(type(value))
    try:
        return adapter.dump_json(value, indent=1).decode() + "\n"
    except PydanticSerializationError:  # half of a letter in a name: no UTF-8, but JSON can write it
        return json.dumps(adapter.dump_python(value, mode="json"), indent=1) + "\n"


def from_json(text: str) -> Report:
    """The report that ``to_json`` wrote."""
    return TypeAdapter(Report).validate_json(text)


def json_schema(kind: str = "scan") -> dict[str, Any]:
    """JSON Schema (2020-12) of a kind of document."""
    schema = TypeAdapter(DOCUMENTS[kind]).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The schema of a scan's report as it stands in ``docs/report.schema.json``."""
    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"
