"""Differences between a model and its reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.formats import ROUNDING_DB
from ampaudit.core.text import plural
from ampaudit.findings.finding import Finding, Severity
from ampaudit.run.comparison import ModelComparison, ModelDifference

_ADVICE = "compare the node with its counterpart, and convert or export it again"


def comparison_in(context: CheckContext) -> ModelComparison:
    """Return the comparison of an audit."""
    assert context.record.comparison is not None, "every batch is compared"
    return context.record.comparison


def differences_with(code: str, context: CheckContext) -> Iterator[Finding]:
    """Yield the differences that make outputs wrong (AMP611), or those that do not on this input (AMP612)."""
    differences = comparison_in(context).differences
    others = {output for other in differences if other.kind != "clamped" for output in other.outputs}
    for difference in differences:
        if code != ("AMP611" if difference.outputs else "AMP612"):
            continue
        explained = _harmless(context, difference) or set(difference.outputs) <= others
        if difference.kind == "clamped" and explained:
            continue  # as masks are meant to be
        cause = f"{_describe(difference)}; {_effect(context, difference)}"
        severity = Severity.WARNING if _harmless(context, difference) else Severity.ERROR
        yield finding_at(context, difference.site, code, cause, _ADVICE, severity=severity)


def _describe(difference: ModelDifference) -> str:
    other, where = difference.counterpart, ""
    if other is not None:
        line = f" ({other.source.file}:{other.source.line})" if other.source is not None else ""
        where = f"{other.id}{line}"
    if difference.kind == "missing":
        return f"{difference.what} of the reference is missing before this op: {where}"
    return f"{difference.what}; its counterpart is {where}" if where else difference.what


def _effect(context: CheckContext, difference: ModelDifference) -> str:
    if not difference.outputs:
        return "on these inputs it makes no difference"
    first, *others = difference.outputs
    more = f" ({plural(len(others), 'more output')} too)" if others else ""
    accuracy = _accuracy(context, first)
    if accuracy is None:
        return f"{first} differs{more}"
    text = f"{accuracy:.0f} dB" if math.isfinite(accuracy) else "nothing right"
    return f"{first} has {text} against the reference{more}"


def _accuracy(context: CheckContext, output: str) -> float | None:
    comparison = context.record.outputs.get(output)
    return None if comparison is None else comparison.accuracy_db


def _harmless(context: CheckContext, difference: ModelDifference) -> bool:
    accuracies = (_accuracy(context, output) for output in difference.outputs)
    least = max(context.config.min_sqnr, ROUNDING_DB.get(context.number_format.name, 0.0))
    return all(accuracy is None or accuracy >= least for accuracy in accuracies)


CHECKS = (
    Check("AMP612", partial(differences_with, "AMP612")),
    Check("AMP611", partial(differences_with, "AMP611")),
)
