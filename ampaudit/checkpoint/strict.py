"""JSON from files that nobody vouches for."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["DuplicateName", "unique_json"]


class DuplicateName(ValueError):
    """A table has one name twice; most readers would silently take the last."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name!r} is in it twice")


def unique_json(text: bytes | str) -> Any:
    """The value, if every table in it has each name once.

    Raises:
        ValueError: not JSON, nested too deeply, or (``DuplicateName``) a name that is there twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DuplicateName(name)
        found[name] = value
    return found
