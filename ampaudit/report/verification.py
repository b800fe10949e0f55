"""The document of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.card import CardRows, Shown, counted
from ampaudit.report.problem import Problem

__all__ = ["Verification"]


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
        found = counted(len(self.problems), "problem")
        return f"{'FAIL' if self.problems else 'PASS'} {self.directory}: {found}"

    def card_rows(self) -> CardRows:
        """Return the problems."""
        return [(problem.kind, problem.where, problem.what) for problem in self.problems]
