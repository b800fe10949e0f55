"""Rules: each listens to events of the flow, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ampaudit.linter.diagnostic import Mistake

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["RULES", "Check", "Rules", "rule"]

Check: TypeAlias = Callable[["Interpreter", Any], Iterator[Mistake]]
Rules: TypeAlias = Mapping[type, Sequence[tuple[str, Check]]]
C = TypeVar("C", bound=Check)

_by_subject: dict[type, list[tuple[str, Check]]] = {}
RULES: Rules = _by_subject  # by what each rule listens to, in the order of their definition


def rule(code: str, *subjects: type) -> Callable[[C], C]:
    """Register a function that yields the mistakes of one code.

    The function gets the interpreter, whose state is the one before the event takes effect, and the event.

    Args:
        code: Code of the mistakes.
        *subjects: Events to listen to, or one of ``EntryPointFollowed``, ``BranchesFollowed``,
            ``ClassFollowed`` and ``ScriptFollowed``, which end the analysis of a part of the script.
    """

    def register(check: C) -> C:
        for subject in subjects:
            _by_subject.setdefault(subject, []).append((code, check))
        return check

    return register
