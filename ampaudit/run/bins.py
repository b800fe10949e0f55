"""Counts by exponent, which JSON holds as the lowest exponent and the counts from there on."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

__all__ = ["AS_RUN", "Bins"]


def _run_of(counts: dict[int, int]) -> list[int]:
    """Return the lowest exponent, and the counts of all up to the highest."""
    if not counts:
        return []
    low, high = min(counts), max(counts)
    return [low, *(counts.get(exponent, 0) for exponent in range(low, high + 1))]


def _counts_of(found: Any) -> Any:
    """Return the counts again; whatever is no list of integers is left to the type's own validation."""
    if not isinstance(found, list) or not all(type(item) is int for item in found):
        return found
    return {found[0] + place: count for place, count in enumerate(found[1:]) if count}


AS_RUN = (BeforeValidator(_counts_of), PlainSerializer(_run_of, return_type=list[int]))
Bins = Annotated[dict[int, int], *AS_RUN]
