"""The number of steps that the interpretation of a script may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ampaudit.linter.flow.script import ScriptTooLong

__all__ = ["STEPS_AT_ONCE", "ImportsTooLong", "StepBudget", "StepLimitReached"]

STEPS_AT_ONCE: Final = 16
_MAX_STEPS: Final = 60_000  # per entry point; the rest of a longer one is skipped
_MAX_STEPS_ELSEWHERE: Final = 20_000  # per script, in files that it imports
_FACTS_PER_STEP: Final = 16  # that cost as much as a step
_MAX_WORK: Final = 2_500_000  # per script, which is not read beyond it: some seconds


class StepLimitReached(Exception):
    """Raised when an entry point takes too many steps to interpret."""


class ImportsTooLong(Exception):
    """Raised when imported files take too many steps, so that the script is analyzed without them."""


@dataclass(slots=True)
class StepBudget:
    """Counts the steps of an interpretation, and ends it at a limit.

    Attributes:
        follows_imports: Whether the script is analyzed with files that it imports.
    """

    follows_imports: bool
    _steps: int = 0
    _elsewhere: int = 0
    _work: int = 0

    def next_entry_point(self) -> None:
        """Begin another entry point, which may take as many steps."""
        self._steps = 0

    def spend(self, facts: int, is_elsewhere: bool) -> None:
        """Take ``STEPS_AT_ONCE`` steps, in a state with a number of facts that each branch copies and joins.

        Raises:
            ImportsTooLong: A limit is reached while imports are followed.
            StepLimitReached: The entry point takes too many steps.
            ScriptTooLong: The script takes too much work.
        """
        self._steps += STEPS_AT_ONCE
        self._elsewhere += STEPS_AT_ONCE * is_elsewhere
        self._work += STEPS_AT_ONCE * (1 + facts // _FACTS_PER_STEP)
        if self._steps <= _MAX_STEPS and self._work <= _MAX_WORK and self._elsewhere <= _MAX_STEPS_ELSEWHERE:
            return
        if self.follows_imports:
            raise ImportsTooLong
        if self._steps > _MAX_STEPS:
            raise StepLimitReached
        raise ScriptTooLong("too long to be analyzed: split it into several files")
