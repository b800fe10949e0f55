"""Checks turn the record of a run into findings; each code has one check or cause, and one page.

A check is ``Check(code, find)`` in the ``CHECKS`` of its module; a cause, a function with
``@cause(code, advice)``, names the reason for an origin (``causes.py``). Kind and severity stand on the page
(``ampaudit.findings.pages``).
"""

from __future__ import annotations

from ampaudit.audit.checks import (
    causes,
    coverage,
    model_code,
    outputs,
    precision,
    range,
    speed,
)
from ampaudit.audit.checks.interface import Check, CheckContext, run_checks
from ampaudit.findings.finding import Evidence, Finding, Severity, Source

__all__ = [
    "ALL_CHECKS",
    "Check",
    "CheckContext",
    "Evidence",
    "Finding",
    "Severity",
    "Source",
    "run_checks",
]

ALL_CHECKS: tuple[Check, ...] = (
    *causes.CHECKS,
    *range.CHECKS,
    *precision.CHECKS,
    *outputs.CHECKS,
    *model_code.CHECKS,
    *speed.CHECKS,
    *coverage.CHECKS,
)
