"""The rules, one file for each family."""

from ampaudit.linter.rules import (  # noqa: F401  (each registers its rules)
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
