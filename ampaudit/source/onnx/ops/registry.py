"""The table of operators that have a function here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["OPERATORS", "Operator", "operator"]

Operator = Callable[..., Any]
OPERATORS: dict[tuple[str, str], Operator] = {}


def operator(*names: str, domain: str = "") -> Callable[[Operator], Operator]:
    """Register a function of a ``NodeCall`` and its inputs for operators of these names."""

    def register(function: Operator) -> Operator:
        for name in names:
            assert (domain, name) not in OPERATORS, name
            OPERATORS[domain, name] = function
        return function

    return register
