"""Renders a document as JSON."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from ampaudit.core.text import escape_json


def to_json(value: Any) -> str:
    """Return indented JSON, with fields in the order of the dataclass and a final newline."""
    adapter = TypeAdapter(type(value))
    try:
        return escape_json(adapter.dump_json(value, indent=1).decode()) + "\n"
    except PydanticSerializationError:  # a lone surrogate in a name: not UTF-8, but JSON can escape it
        return json.dumps(adapter.dump_python(value, mode="json"), indent=1) + "\n"
