"""Finds Python numbers that change when they are rounded to 16 bits, in comparisons and arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.core.text import format_number
from ampaudit.trace import Site
from ampaudit.trace.functional import overload_of
from ampaudit.trace.values import computing_dtype, converted_numbers, fake_arguments

__all__ = ["RoundedNumber", "rounded_number"]

_WITHIN = 2  # ops before the one that is reported: a comparison, and what combines masks


class RoundedNumber(NamedTuple):
    """A number that 16 bits round to another one, in words, and the op that takes it."""

    site: Site
    text: str

    @property
    def decides(self) -> bool:
        """Whether the op compares, that is, its result is not a float."""
        return self.site.dtype is None


def rounded_number(context: CheckContext, site: Site) -> RoundedNumber | None:
    """Return a number that rounding changes at or shortly before a site: ``0.9999 is 1 in float16``."""
    frontier = [site]
    for _ in range(_WITHIN + 1):
        for step in frontier:
            if (text := _rounded_number(context, step)) is not None:
                return RoundedNumber(step, text)
        frontier = [maker for step in frontier for maker in context.flow.makers(step)]
    return None


def _rounded_number(context: CheckContext, site: Site) -> str | None:
    node = context.flow.node(site)
    op = overload_of(node.target)
    if op is None:
        return None
    args, kwargs = fake_arguments(node)
    dtype = computing_dtype(op, args, kwargs)
    if dtype is None:
        return None
    read = converted_numbers(op, args, kwargs, dtype)
    for number, rounded in zip((*args, *kwargs.values()), (*read[0], *read[1].values()), strict=True):
        if rounded is not number:
            before, after = format_number(number), format_number(rounded)
            return f"{before} at {site.id} is {after} in {context.number_format.name}"
    return None
