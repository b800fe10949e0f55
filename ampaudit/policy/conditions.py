"""Defines the conditions of rules on numbers and arguments."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["UNSET", "ArgTest", "NumericCondition"]

Scalar = bool | int | float | str | None


class _Unset:
    """The type of an argument left at its default."""

    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


class NumericCondition(BaseModel):
    """Limits on a number: ``min`` and ``max`` include their value, ``above`` and ``below`` do not."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _possible(self) -> NumericCondition:
        lows = [(v, strict) for v, strict in ((self.min, False), (self.above, True)) if v is not None]
        highs = [(v, strict) for v, strict in ((self.max, False), (self.below, True)) if v is not None]
        if not lows and not highs:
            raise ValueError("give at least one of min, max, above, below")
        for low, low_open in lows:
            for high, high_open in highs:
                if low > high or (low == high and (low_open or high_open)):
                    raise ValueError(f"no number lies between {low:g} and {high:g}")
        return self

    def holds(self, value: float) -> bool:
        """Whether a number is within the limits; NaN never is."""
        return (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


class ArgTest(BaseModel):
    """A test of one argument; all given keys must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    equals: Scalar = None
    any_of: tuple[Scalar, ...] = Field(default=(), alias="in")
    range: NumericCondition | None = Field(
        default=None, description="of a number, or of every number in a list"
    )
    magnitude: NumericCondition | None = Field(default=None, description="the same for absolute values")
    unset: bool | None = Field(default=None, description="whether it was left at its default")

    @model_validator(mode="after")
    def _says_something(self) -> ArgTest:
        if not self.model_fields_set:
            raise ValueError("give at least one of equals, in, range, magnitude, unset")
        return self

    def holds(self, value: Any) -> bool:
        """Whether the argument (``UNSET`` if left out; a number, string, bool, list or ``None``) passes."""
        given = value is not UNSET
        if self.unset is not None and self.unset is given:
            return False
        if "equals" in self.model_fields_set and not (given and _same(value, self.equals)):
            return False
        if self.any_of and not (given and any(_same(value, item) for item in self.any_of)):
            return False
        numbers = _numbers(value)
        if self.range is not None and not (numbers and all(self.range.holds(n) for n in numbers)):
            return False
        return self.magnitude is None or bool(
            numbers and all(self.magnitude.holds(abs(number)) for number in numbers)
        )


def _same(value: Any, expected: Scalar) -> bool:
    """Compare two values, distinguishing True from 1."""
    return isinstance(value, bool) is isinstance(expected, bool) and bool(value == expected)


def _numbers(value: Any) -> list[float]:
    items = value if isinstance(value, list | tuple) else [value]
    numbers = [float(v) for v in items if isinstance(v, int | float) and not isinstance(v, bool)]
    return numbers if len(numbers) == len(items) else []
