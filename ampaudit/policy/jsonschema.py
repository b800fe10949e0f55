"""The JSON Schema of a rule file; ``docs/rules.schema.json`` is this, written out."""

from __future__ import annotations

import json

from ampaudit.policy.schema import RuleFile

__all__ = ["schema_text"]


def schema_text() -> str:
    """JSON Schema (2020-12), indented, keys sorted, a newline at the end."""
    schema = RuleFile.model_json_schema(by_alias=True)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | schema, indent=1, sort_keys=True) + "\n"
