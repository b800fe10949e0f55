"""Checks turn the record of a run into findings; each code has one module and one page.

A check is ``CHECK = Check(code, find)``; a cause, ``CAUSE = Cause(code, applies, advice)``, names the
reason for an origin (``origins.py``). Kind and severity stand on the page (``ampaudit.report.pages``).
"""

from __future__ import annotations

from ampaudit.audit.checks import (
    alignment,
    between_steps,
    cancellation,
    code_differs,
    code_unknown,
    costly_island,
    double,
    epsilon,
    flipped_branch,
    flipped_decision,
    float32_spread,
    forbidden,
    gradient_error,
    gradient_overflow,
    gradient_vanishes,
    growth,
    hard_cast,
    headroom,
    hidden_clamp,
    in_place,
    inside_norm,
    left_torch,
    local_error,
    log_sigmoid,
    log_softmax,
    mask,
    mixed_dtypes,
    no_gradient,
    no_kernel,
    no_loss_scale,
    not_taken,
    opaque,
    origins,
    other_function,
    output_error,
    output_variation,
    own_backward,
    ping_pong,
    positions,
    probabilities,
    saturated,
    small_weights,
    stalled_sum,
    tied_weights,
    uncovered,
    unmentioned,
    weights,
    what_if,
    without_effect,
)
from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.audit.checks.running import run_checks
from ampaudit.report.finding import Evidence, Finding, Severity, Source

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

_MODULES = (
    *(
        origins,
        between_steps,
        weights,
        forbidden,
        headroom,
        what_if,
        mask,
        hidden_clamp,
        inside_norm,
        saturated,
    ),
    *(epsilon, log_softmax, log_sigmoid, cancellation, positions, local_error),
    *(output_error, flipped_decision, stalled_sum, output_variation),
    *(growth, code_differs, code_unknown, flipped_branch, left_torch),
    *(hard_cast, double, probabilities, in_place, no_kernel),
    *(small_weights, tied_weights),
    *(other_function, without_effect),
    *(alignment, ping_pong, costly_island, float32_spread),
    *(gradient_overflow, gradient_vanishes, no_loss_scale, gradient_error, no_gradient, own_backward),
    *(uncovered, unmentioned, not_taken),
)
ALL_CHECKS: tuple[Check, ...] = (
    *(module.CHECK for module in _MODULES),
    *mixed_dtypes.CHECKS,
    *opaque.CHECKS,
)
