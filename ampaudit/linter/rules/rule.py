"""Rules: each listens to events of the flow, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ampaudit.linter.diagnostic import Mistake
from ampaudit.linter.flow.interpreter import Interpreter, LintRule

R = TypeVar("R", bound=Callable[[Interpreter, Any], Iterator[Mistake]])
RULES: dict[type, list[LintRule]] = {}  # by what they listen to


def rule(code: str, *subjects: type, of_dtypes: bool = False) -> Callable[[R], R]:
    """Register a function that yields the mistakes of one code.

    The function gets the interpreter, whose state is the one before the event takes effect, and the event.

    Args:
        code: Code of the mistakes.
        *subjects: Events to listen to, or one of ``EntryPointFollowed``, ``BranchesFollowed``,
            ``ClassFollowed`` and ``ScriptFollowed``, which end the analysis of a part of the script.
        of_dtypes: Whether the rule is about dtypes, as in ``LintRule``.
    """

    def register(check: R) -> R:
        for subject in subjects:
            RULES.setdefault(subject, []).append(LintRule(code, check, of_dtypes))
        return check

    return register
