"""Rules: each listens to events of the flow, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ampaudit.linter.diagnostic import Mistake
from ampaudit.linter.flow.interpreter import Interpreter, RulesBySubject

__all__ = ["RULES", "rule"]

R = TypeVar("R", bound=Callable[[Interpreter, Any], Iterator[Mistake]])
_by_subject: dict[type, list[tuple[str, Callable[[Interpreter, Any], Iterator[Mistake]]]]] = {}
RULES: RulesBySubject = _by_subject


def rule(code: str, *subjects: type) -> Callable[[R], R]:
    """Register a function that yields the mistakes of one code.

    The function gets the interpreter, whose state is the one before the event takes effect, and the event.

    Args:
        code: Code of the mistakes.
        *subjects: Events to listen to, or one of ``EntryPointFollowed``, ``BranchesFollowed``,
            ``ClassFollowed`` and ``ScriptFollowed``, which end the analysis of a part of the script.
    """

    def register(check: R) -> R:
        for subject in subjects:
            _by_subject.setdefault(subject, []).append((code, check))
        return check

    return register
