"""The rules, one file for each family."""

from ampaudit.linter.rules import (
    accumulation,
    bookkeeping,
    constants,
    dtypes,
    gradients,
    managed_loops,
    regions,
    scaler_order,
    weights,
)
from ampaudit.linter.rules.rule import RULES

__all__ = [
    "RULES",
    "accumulation",
    "bookkeeping",
    "constants",
    "dtypes",
    "gradients",
    "managed_loops",
    "regions",
    "scaler_order",
    "weights",
]
