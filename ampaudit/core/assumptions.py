"""Defines the assumed range of a model's input."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampaudit.core.errors import UsageError

__all__ = ["Assumption", "parse_assumption"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """The assumed range of one input.

    Attributes:
        name: Name of the input in reports, such as ``input[0]``.
        low: Smallest value.
        high: Largest value.
        source: ``stated``, ``embedding table`` or ``batches``.
    """

    name: str
    low: float
    high: float
    source: str


def parse_assumption(text: str) -> tuple[str, float, float]:
    """Parse ``input[0]=-1:1``, or ``input=-1:1`` for every floating-point input.

    Raises:
        UsageError: The text is not a name and a range of finite numbers.
    """
    name, _, ends = text.partition("=")
    low, _, high = ends.partition(":")
    try:
        numbers = float(low), float(high)
    except ValueError:
        numbers = math.nan, math.nan
    if not name or not numbers[0] <= numbers[1] or math.isinf(numbers[0]) or math.isinf(numbers[1]):
        raise UsageError(
            f"--assume {text!r} is not a valid range", hint="--assume 'input[0]=-1:1', or input=-1:1 for all"
        )
    return name.strip(), *numbers
