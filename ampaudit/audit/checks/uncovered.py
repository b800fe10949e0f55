"""AMP901: values that were not checked; and every gap of an audit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.audit.checks.not_taken import modules_not_run
from ampaudit.report.finding import Finding
from ampaudit.report.gap import Gap, GapKind
from ampaudit.trace import Role, Site
from ampaudit.trace.path.reads import ReadKind

__all__ = ["CHECK", "findings_on_gaps", "foreign_sites", "gaps_of"]

_OUTSIDE = "what other code makes of them is taken from FP32"
_OTHER_CODE = "16 bits would run code that was not audited"
_INSIDE = "it is run as one op, and only its results are measured"


def foreign_sites(context: CheckContext) -> Iterator[Site]:
    """Return the sites that compute with an op from outside ATen."""
    for site in context.graph_sites:
        if site.role is Role.COMPUTE and "." in site.op and not site.op.startswith(("aten.", "prims.")):
            yield site


def gaps_of(context: CheckContext) -> tuple[Gap, ...]:
    """Collect what the audit did not look at: one gap per op and kind, at its first site in graph order."""
    found = [*context.record.gaps]
    found += [Gap(site.id, GapKind.OPAQUE, site.op, _INSIDE) for site in foreign_sites(context)]
    for site in context.graph_sites:
        if site.twin and (reason := context.record.twins.get(site.twin.op, "nothing was run")):
            found.append(Gap(site.id, GapKind.UNCHECKED_TWIN, site.twin.op, reason))
    gradients = context.record.gradients
    for custom in gradients.untraced if gradients is not None else ():
        if not custom.instead:
            found.append(Gap(custom.site, GapKind.BACKWARD, custom.name, custom.reason))
    for read in context.record.path.reads.values():
        if read.kind is ReadKind.ARRAY:
            found.append(Gap(read.place, GapKind.OUTSIDE, f"{read.name}()", _OUTSIDE))
        elif read.differing:
            line = read.source and f" at {PurePath(read.source.file).name}:{read.source.line}"
            found.append(Gap(read.place, GapKind.OTHER_CODE, f"{read.name}{line or ''}", _OTHER_CODE))
    if (not_run := modules_not_run(context)) is not None:
        found.append(not_run)
    order = {site.id: number for number, site in enumerate(context.sites)}
    gaps: dict[tuple[GapKind, str], Gap] = {}
    for gap in sorted(found, key=lambda gap: order.get(gap.site, len(order))):
        first = gaps.setdefault((gap.kind, gap.op), gap)
        if first is not gap:
            gaps[gap.kind, gap.op] = replace(first, sites=first.sites + 1)
    return tuple(gaps.values())


def findings_on_gaps(context: CheckContext, code: str, advice: str) -> Iterator[Finding]:
    """Yield a finding for each gap that has this code."""
    for gap in gaps_of(context):
        if gap.kind.code == code:
            several = gap.sites > 1 and gap.kind is not GapKind.UNCHECKED_TWIN
            more = f", at {gap.sites} sites" if several else ""
            yield finding_at(context, context.site[gap.site], code, f"{gap.in_words}{more}", advice)


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op that could not be observed, at its first site."""
    return findings_on_gaps(context, "AMP901", "judge this op by hand; the sites after it are audited")


CHECK = Check("AMP901", find)
