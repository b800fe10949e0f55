"""A problem of a converted directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Problem", "ProblemKind"]

ProblemKind = Literal["missing", "truncated", "changed", "tensor", "extra", "rounding", "program", "output"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its place and description.

    Attributes:
        kind: ``missing``, ``truncated``, ``changed`` or ``extra`` files; a ``tensor`` whose values are not
            those that were written; ``rounding``: it is not its master rounded; ``program``: the program
            holds other weights; ``output``: it computes something else.
        where: the file, with the tensor or the output where that is known.
        what: in words.
    """

    kind: ProblemKind
    where: str
    what: str
