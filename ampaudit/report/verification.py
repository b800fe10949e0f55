"""The document of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.card import CardRows, Shown, counted

__all__ = ["Problem", "Verification"]

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


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Shown):
    """The verification of a directory: counts of checks, problems, and the program's outputs."""

    directory: str
    files: int
    bytes: int
    tensors: int
    masters: int
    problems: tuple[Problem, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]
    schema: Literal[1] = 1
    kind: Literal["verification"] = "verification"

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 otherwise."""
        return 1 if self.problems else 0

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        problems = counted(len(self.problems), "problem")
        return f"{'FAIL' if self.problems else 'PASS'} {self.directory}: {problems}"

    def card_rows(self) -> CardRows:
        """Return the problems."""
        return [(problem.kind, problem.where, problem.what) for problem in self.problems]
