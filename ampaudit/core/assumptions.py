"""Parses what users state about inputs: their ranges (``--assume``) and sizes (``--sweep``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ampaudit.core.errors import UsageError
from ampaudit.core.untrusted import describe

_EXAMPLE = "--sweep length=64,256,1024"
_MAX_VALUE = 1 << 31
_MAX_NAME = 60


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


def sweep_text(value: Any) -> Any:
    """Write ``{"length": [64, 256]}`` as ``length=64,256``; return other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    return ";".join(
        f"{name}={','.join(map(str, values if isinstance(values, Iterable) else [values]))}"
        for name, values in value.items()
    )


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse ``length=64,256,1024``: an axis and increasing sizes.

    Raises:
        UsageError: The text is not an axis and increasing sizes.
    """
    name, _, listed = text.partition("=")
    axis, problem = name.strip(), ""
    values: list[int] = []
    for part in filter(None, map(str.strip, listed.split(","))):
        if not part.isascii() or not part.isdecimal() or not 0 < int(part[:12]) < _MAX_VALUE:
            problem = problem or f"{describe(part)!r} is not a size"
        else:
            values.append(int(part))
    if not (axis.isidentifier() and axis.isascii() and len(axis) <= _MAX_NAME):
        problem = f"{describe(axis)!r} is not the name of an axis" if axis else "it has no axis"
    elif "=" in listed:
        problem = "one axis at a time"
    elif not problem and not values:
        problem = "it has no values"
    elif not problem and any(a >= b for a, b in pairwise(values)):
        problem = "its values do not increase"
    if problem:
        raise UsageError(f"--sweep {describe(text)!r}: {problem}", hint=f"for example {_EXAMPLE}")
    return axis, tuple(values)
