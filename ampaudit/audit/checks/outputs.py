"""AMP207, AMP209, AMP210: an inaccurate output, and the op where its error enters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ampaudit.audit.checks.interface import (
    SCALE_INPUT,
    Check,
    CheckContext,
    finding_about,
    finding_at,
    source_of,
)
from ampaudit.audit.checks.precision import rounded_number, subtracts
from ampaudit.core.sites import SiteId
from ampaudit.core.text import differing_share, format_number, listed
from ampaudit.findings.finding import Evidence, Finding, Severity
from ampaudit.report.model import LOST_DB
from ampaudit.report.steps import StepGrowth
from ampaudit.run.attribution import Culprit
from ampaudit.run.meter import DecisionDetail, spacing
from ampaudit.run.outputs import OutputComparison
from ampaudit.run.record import StateFault
from ampaudit.trace import Role, Site

NOTICEABLE_DB = 10.0
MAX_UNCHANGED = 0.5  # share of the elements that FP32 changes which may stay unchanged in a buffer
STALLS = 0.1  # share of additions without effect from which a sum is said to stall


def inaccurate(context: CheckContext) -> dict[str, OutputComparison]:
    """Return the outputs below the required accuracy, the worst first."""
    comparisons = {
        name: comparison
        for name, comparison in context.record.outputs.items()
        if comparison.accuracy_db is not None and comparison.accuracy_db < context.config.min_sqnr
    }
    return dict(sorted(comparisons.items(), key=lambda item: item[1].accuracy_db or 0.0))


def accuracy_text(output: OutputComparison, dtype: str) -> str:
    """Describe what is wrong with an output, as the rest of a sentence that begins with its name."""
    if output.mismatch:
        return f"has {output.mismatch}"
    if output.bad:
        return f"has {output.bad} of {output.elements} elements that are inf or NaN in {dtype} only"
    if output.kind == "integer":
        return f"differs from FP32 in {output.differing} of {output.elements} elements"
    accuracy = output.accuracy_db
    if accuracy is None:
        return "is exact"
    if accuracy == -math.inf:
        return f"is 0 in FP32 and not in {dtype}"
    return f"has {accuracy:.0f} dB against FP32"


def findings_with(code: str, context: CheckContext) -> Iterator[Finding]:
    """Yield findings of one of the three codes: one per culprit, and one per output without any."""
    if context.harmed or context.broken_weights or context.config.ranges:
        return
    wrong = inaccurate(context)
    culprits = [culprit for culprit in context.record.culprits if wrong.keys() & set(culprit.outputs)]
    explained = {name for culprit in culprits for name in culprit.outputs}
    for culprit in (*culprits, *(Culprit((name,)) for name in wrong if name not in explained)):
        names = [name for name in culprit.outputs if name in wrong]
        if not culprit.sites and _by_code(context, names[0]):
            continue
        peaks = [context.observed(site).ref_peak for site in culprit.sites]
        if "saturate" in context.contract.words and any(peak > context.number_format.max for peak in peaks):
            continue  # reported as AMP116
        finding = _finding(context, culprit, wrong[names[0]], names)
        if finding.code == code:
            yield finding


def _by_code(context: CheckContext, name: str) -> bool:
    """Return whether an output is wrong because of other code: in 16 bits (AMP212), or at all (AMP611)."""
    comparison = context.record.comparison
    if comparison is not None and name in comparison.wrong:
        return True
    differs = context.record.code.outputs.get(name)
    return differs is not None and not differs.agrees


def _finding(context: CheckContext, culprit: Culprit, output: OutputComparison, names: list[str]) -> Finding:
    dtype = context.number_format.name
    what = f"{names[0]} {accuracy_text(output, dtype)}; {_required(context, output)}"
    if len(names) > 1:
        what += f" ({listed(names[1:])} too)"
    code, why, advice = _explain(context, culprit, output, names[0])
    site = context.output_site(names[0]) or context.graph_sites[-1]
    site = context.site[culprit.sites[0]] if culprit.sites else site
    finding = finding_at(context, site, code, f"{what}; {why}", advice)
    batch = context.record.names.get(output.batch)
    return replace(finding, poisons=tuple(culprit.sites[1:]), batch=batch)


def _required(context: CheckContext, output: OutputComparison) -> str:
    if output.mismatch or output.bad:
        return "it cannot be compared with FP32"
    required = f"{context.config.min_sqnr:.0f}"
    if output.kind == "integer":
        return f"at most {differing_share(context.config.min_sqnr):.0%} may differ (--min-sqnr {required})"
    return f"{required} dB are required"


def _explain(
    context: CheckContext, culprit: Culprit, comparison: OutputComparison, output: str
) -> tuple[str, str, str]:
    """Return code, cause and advice."""
    if not culprit.sites and comparison.bad:  # an op that made them would be an origin
        why = f"no op makes them: they are values of an input that {context.number_format.name} cannot hold"
        return "AMP207", why, SCALE_INPUT
    step = context.step_of(comparison.batch)
    if not culprit.sites and step is not None and step > 1:
        why = f"no op of step {step} stands out: the error has built up over the steps"
        for trend in _harmful(context):
            if trend.what == "error":
                why += f", and doubles every {format_number(trend.doubles_every)} of them"
                break
        return "AMP207", why, "keep in float32 what is carried from step to step"
    if not culprit.sites:
        why = "no op or line stands out: the error is spread over the model"
        return "AMP207", why, "use --dtype float16, or a policy that keeps more ops in float32"
    more = f" and {len(culprit.sites) - 1} more of its line" if len(culprit.sites) > 1 else ""
    rounded = f"the rounding of {culprit.operand}, read by " if culprit.operand else ""
    where = f"{rounded}{culprit.sites[0]}{more}"
    alone, rest = (_decibels(db, comparison) for db in (culprit.alone_db, culprit.without_db))
    dtype = context.number_format.name
    proof = f"with only this in {dtype} the output has {alone}, with all but this {rest}"
    if culprit.decision is not None:
        itself = f"the choices of {culprit.decision}"
        if culprit.decision in culprit.sites:
            itself = "its own choices"
        number = rounded_number(context, context.site[culprit.decision])
        details = "; ".join(filter(None, (number and number.text, _detail(context, culprit.detail), proof)))
        why = f"{where} flips {itself}: {details}"
        return "AMP209", why, f"compute what {culprit.decision} compares in float32"
    if culprit.stalled >= STALLS:
        why = f"the sum stalls: {culprit.stalled:.0%} of the additions at {where} change nothing, since "
        why += f"x + y rounds to x once y is below half of {dtype}'s step at x; {proof}"
        return "AMP210", why, "keep the sum in float32, or count in integers"
    growth, advice = "", "keep this op in float32"
    if culprit.without_db is not None and culprit.without_db < context.config.min_sqnr:
        advice += " together with those that round its values again; alone it does not suffice"
    if (drop := _largest_drop(context, culprit.sites[-1], output)) is not None:
        site, before, after = drop
        growth = f", and grows at {site.id} from {before:.0f} to {after:.0f} dB"
        if subtracts(context, site):
            advice += f", and rewrite {site.id}, a difference of nearly equal values"
    return "AMP207", f"the error enters at {where}{growth}; {proof}", advice


def _decibels(accuracy: float | None, output: OutputComparison) -> str:
    if accuracy is None:
        return "no error"
    if accuracy == -math.inf:
        return "nothing right"
    if output.kind == "integer":
        return f"{round(differing_share(accuracy) * output.elements)} elements wrong"
    return f"{accuracy:.0f} dB"


def _detail(context: CheckContext, detail: DecisionDetail | None) -> str:
    if detail is None or not detail.differing:
        return "they differ between the two runs"
    form = context.number_format
    text = f"{detail.differing} of {detail.elements} differ"
    if detail.ties:
        text += f", {detail.ties} of them ties in {form.name}"
    if detail.error is not None:
        text += f"; what they are made from is off by {format_number(detail.error)} (median)"
    if detail.margin is not None and detail.magnitude is not None:
        step = spacing(detail.magnitude, form.fraction_bits)
        text += f"; the median margin in FP32 is {format_number(detail.margin)}"
        if detail.margin <= step:
            text += (
                f", and {form.name} has steps of {format_number(step)} at {format_number(detail.magnitude)}"
            )
    return text


def _largest_drop(context: CheckContext, culprit: SiteId, output: str) -> tuple[Site, float, float] | None:
    """Return the op after a culprit at which the accuracy drops most, if noticeably.

    With it come the accuracies of its least accurate input and of its result, in dB.
    """
    candidates: list[tuple[Site, float, float]] = []
    behind = {culprit}
    leading = {site for name, site, _ in context.outputs if name == output and site is not None}
    for site in reversed(context.graph_sites):
        if site.id in leading:
            leading |= {producer.id for producer in context.flow.producers(site)}
    for site in context.graph_sites:
        producers = [producer.id for producer in context.flow.producers(site)]
        if not behind.intersection(producers):
            continue
        behind.add(site.id)
        after = context.observed(site.id).sqnr_db
        accuracies = [db for producer in producers if (db := context.observed(producer).sqnr_db) is not None]
        if site.id in leading and site.role is Role.COMPUTE and after is not None and accuracies:
            candidates.append((site, min(accuracies), after))
    worst = max(candidates, key=lambda drop: drop[1] - drop[2], default=None)
    return worst if worst is not None and worst[1] - worst[2] >= NOTICEABLE_DB else None


def find_output_variation(context: CheckContext) -> Iterator[Finding]:
    """Find outputs that are accurate only because of their mean."""
    if context.config.ranges or context.harmed:
        return
    wrong = inaccurate(context)
    for name, site, _ in context.outputs:
        comparison = context.record.outputs.get(name)
        rows = comparison.rows if comparison is not None else None
        if comparison is None or site is None or name in wrong or rows is None or rows.db >= LOST_DB:
            continue
        spread, error = ((part / rows.elements) ** 0.5 for part in (rows.spread_sq, rows.err_sq))
        what = "it varies" if not rows.worst else "rows vary"
        around = f" around {format_number(rows.mean)}" if not rows.worst else ""
        cause = (
            f"{name} has {comparison.accuracy_db:.0f} dB only because of its mean: {what} by "
            f"{format_number(spread)}{around}, and the error is {format_number(error)} ({rows.db:.0f} dB)"
        )
        if rows.worst:
            where = ", ".join(":" if i is None else str(i) for i in rows.index)
            cause += f"; the worst is [{where}], around {format_number(rows.mean)}: {rows.worst_db:.0f} dB"
        advice = "subtract the level from the inputs and add it to the output in float32; a float32 output"
        advice += " alone helps if the inputs keep their variation in 16 bits"
        yield finding_at(context, context.site[site], "AMP211", cause, advice)


def find_stalled_sum(context: CheckContext) -> Iterator[Finding]:
    """Find sums that spoil an output, and buffers that stay constant although FP32 changes them.

    A counter that stands still is an error. Other values may have converged: that is a note.
    """
    yield from findings_with("AMP210", context)
    for update in context.record.buffers.values():
        if update.stalled < MAX_UNCHANGED * update.moved:
            continue
        form = context.number_format.name
        cause = (
            f"the buffer {update.name} stalls: FP32 changes {update.moved} of its elements, and {form} "
            f"leaves {update.stalled} of them as they were, such as {format_number(update.example)}"
        )
        advice = "keep the buffer in float32, or count in integers"
        severity = Severity.ERROR if update.counts else Severity.NOTE
        yield finding_at(context, context.site[update.site], "AMP210", cause, advice, severity=severity)


def find_between_steps(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per input, for the first step in which it breaks: it breaks in later ones as well."""
    form, first = context.number_format, dict[str, tuple[int, StateFault]]()
    for row in context.record.steps:
        for fault in row.faults:
            first.setdefault(fault.name, (row.step, fault))
    ends = f"{form.name} ends at {format_number(form.max)}"
    advice = "compute the next inputs in float32 and cast them back where they are in range again"
    for name, (step, fault) in first.items():
        what = f"next_inputs makes {name} from the outputs of step {step}, which are finite"
        peak = format_number(fault.peak)
        why = f"in FP32 it reaches {peak}; {ends}"
        if fault.peak <= form.max:
            why = f"in FP32 it is in range (up to {peak}), and a value on the way to it is not; {ends}"
        site = SiteId(f"next_inputs/{name}")
        yield replace(
            finding_about("AMP118", site, "next_inputs", f"{what}; {why}", advice),
            phase="forward",
            op=fault.op,
            origin=True,
            source=source_of(fault.line),
            evidence=Evidence(
                peak=fault.peak,
                limit=form.max,
                inf=fault.broken - fault.nan,
                nan=fault.nan,
                elements=fault.elements,
                headroom_bits=form.headroom_bits(fault.peak) if fault.peak > 0.0 else None,
                step=step,
            ),
        )


def _harmful(context: CheckContext) -> list[StepGrowth]:
    """Return growth that costs the range, or the required accuracy, in the run or soon after."""
    growth = () if context.steps is None else context.steps.growth
    return [each for each in growth if each.reaches is not None]


def find_growth(context: CheckContext) -> Iterator[Finding]:
    """Yield growth that soon takes values out of range, or outputs below the required accuracy.

    Growth that already breaks a step of the run is left to the findings about that step.
    """
    if any(row.origins or row.faults for row in context.record.steps):
        return
    count = context.config.steps
    for growth in _harmful(context):
        site = context.output_site(growth.name) or context.site.get(SiteId(growth.name))
        if site is None or (growth.reaches or 0) <= (count or 0):
            continue
        every = f"every {format_number(growth.doubles_every)} steps; at this rate"
        reached = f"at about step {growth.reaches}, beyond the {count} that were run"
        if growth.what == "error":
            cause = f"the error of {growth.name} doubles {every} its accuracy falls below "
            cause += f"{context.config.min_sqnr:.0f} dB {reached}"
            advice = "keep in float32 what is carried from step to step, or run fewer steps"
        else:
            cause = (
                f"the values double {every} they leave the range of {context.number_format.name} {reached}"
            )
            advice = "normalize what is carried from step to step, or keep it in float32"
        finding = finding_at(context, site, "AMP119", cause, advice)
        yield replace(finding, evidence=replace(finding.evidence, step=count))


CHECKS = (
    Check("AMP210", find_stalled_sum),
    Check("AMP209", partial(findings_with, "AMP209")),
    Check("AMP207", partial(findings_with, "AMP207")),
    Check("AMP211", find_output_variation),
    Check("AMP118", find_between_steps),
    Check("AMP119", find_growth),
)
