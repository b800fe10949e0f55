"""The report as JSON, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from ampaudit.report.model import Report

if TYPE_CHECKING:
    pass

__all__ = ["comparison_json", "from_json", "json_schema", "to_json"]


_ADAPTER = TypeAdapter(Report)


def to_json(report: Any) -> str:
    """Indented JSON, fields in the order of the dataclass, a newline at the end."""
    adapter = TypeAdapter(type(report))
    try:
        return adapter.dump_json(report, indent=1).decode() + "\n"
    except PydanticSerializationError:  # half of a letter in a name: no UTF-8, but JSON can write it
        return json.dumps(adapter.dump_python(report, mode="json"), indent=1) + "\n"


def comparison_json(reports: Sequence[Report]) -> str:
    """``{"schema": 1, "reports": [...]}``, each as ``scan`` writes it for one policy."""
    inner = ",\n".join(to_json(report).rstrip() for report in reports)
    return f'{{"schema": 1, "reports": [\n{inner}\n]}}\n'


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
