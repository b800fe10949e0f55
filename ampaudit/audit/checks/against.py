"""AMP611, AMP612: the audited model computes something else than its reference (``--against``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at, finding_source
from ampaudit.core.formats import ROUNDING_DB
from ampaudit.core.text import plural
from ampaudit.report.finding import Finding, Severity
from ampaudit.report.model import AgainstReport, Correspondence, ReferenceDifference
from ampaudit.run.against.comparison import ModelDifference

__all__ = ["CHECKS", "against_report", "differences_with"]

_OTHER_FUNCTION_ADVICE = "compare the node with its counterpart, and convert or export it again"


def differences_with(code: str, context: CheckContext) -> Iterator[Finding]:
    """Yield the differences that make outputs wrong (AMP611), or those that do not on this input (AMP612)."""
    comparison = context.record.comparison
    differences = comparison.differences if comparison is not None else ()
    others = {output for other in differences if other.kind != "clamped" for output in other.outputs}
    for difference in differences:
        if code != ("AMP611" if difference.outputs else "AMP612"):
            continue
        explained = _harmless(context, difference) or set(difference.outputs) <= others
        if difference.kind == "clamped" and explained:
            continue  # as masks are meant to be
        cause = f"{_describe(difference)}; {_against_effect(context, difference)}"
        severity = Severity.WARNING if _harmless(context, difference) else Severity.ERROR
        yield finding_at(context, difference.site, code, cause, _OTHER_FUNCTION_ADVICE, severity=severity)


def _describe(difference: ModelDifference) -> str:
    other, where = difference.counterpart, ""
    if other is not None:
        line = f" ({other.source.file}:{other.source.line})" if other.source is not None else ""
        where = f"{other.id}{line}"
    if difference.kind == "missing":
        return f"{difference.what} of the reference is missing before this op: {where}"
    return f"{difference.what}; its counterpart is {where}" if where else difference.what


def _against_effect(context: CheckContext, difference: ModelDifference) -> str:
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
    least = max(context.min_sqnr, ROUNDING_DB.get(context.number_format.name, 0.0))
    return all(accuracy is None or accuracy >= least for accuracy in accuracies)


def against_report(context: CheckContext, reference: str) -> AgainstReport | None:
    """Return the comparison for the report, if there was one."""
    comparison = context.record.comparison
    if comparison is None:
        return None
    return AgainstReport(
        reference,
        tuple(Correspondence(here.id, there.id) for here, there in comparison.matched),
        tuple(site.id for site in comparison.only_audited),
        tuple(site.id for site in comparison.only_reference),
        tuple(_difference_row(difference) for difference in comparison.differences),
    )


def _difference_row(gap: ModelDifference) -> ReferenceDifference:
    other = gap.counterpart
    source = finding_source(other) if other is not None else None
    site = None if other is None else other.id
    return ReferenceDifference(gap.kind, gap.site.id, gap.site.layer, site, source, gap.what, gap.outputs)


CHECKS = (
    Check("AMP612", partial(differences_with, "AMP612")),
    Check("AMP611", partial(differences_with, "AMP611")),
)
