"""Renders a document as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from ampaudit.core.text import escape_control, escape_json

_HALF = re.compile("[\ud800-\udfff]")


def to_json(value: Any) -> str:
    """Return indented JSON, with fields in the order of the dataclass and a final newline."""
    adapter = TypeAdapter(type(value))
    try:
        text = adapter.dump_json(value, indent=1).decode()
    except PydanticSerializationError:  # half of a surrogate pair, as in a file name that is not UTF-8
        text = json.dumps(adapter.dump_python(value, mode="json"), indent=1, ensure_ascii=False)
        text = _HALF.sub(lambda half: "\\" + escape_control(half[0]), text)  # as on a terminal
    return escape_json(text) + "\n"
