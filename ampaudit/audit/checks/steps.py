"""What builds up over several steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, finding_at
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Evidence, Finding, Source
from ampaudit.report.steps import StepGrowth
from ampaudit.run.record import StateFault
from ampaudit.trace import Site

__all__ = ["CHECKS", "error_growth"]


def find_between_steps(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per input, for the first step in which it breaks: FP32's own stays out of range."""
    reported: set[str] = set()
    for row in context.record.steps:
        for fault in row.faults:
            if fault.name not in reported:
                reported.add(fault.name)
                yield _between_steps_finding(context, fault, row.step)


def _between_steps_finding(context: CheckContext, fault: StateFault, step: int) -> Finding:
    form, name = context.number_format, fault.name
    what = f"next_inputs makes {name} from the outputs of step {step}, which are finite"
    ends = f"{form.name} ends at {format_number(form.max)}"
    why = f"in FP32 it reaches {format_number(fault.peak)}; {ends}"
    if fault.peak <= form.max:
        peak = format_number(fault.peak)
        why = f"in FP32 it is in range (up to {peak}), and a value on the way to it is not; {ends}"
    advice = "compute the next inputs in float32 and cast them back where they are in range again"
    finding = finding_about("AMP118", SiteId(f"next_inputs/{name}"), "next_inputs", f"{what}; {why}", advice)
    line = fault.line
    return replace(
        finding,
        phase="forward",
        op=fault.op,
        origin=True,
        source=None if line is None else Source(line.file, line.line, line.code),
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


def error_growth(context: CheckContext) -> StepGrowth | None:
    """Return the growth of an output's error, if it costs the required accuracy in the run or soon after."""
    return next((growth for growth in _harmful(context) if growth.what == "error"), None)


def find_growth(context: CheckContext) -> Iterator[Finding]:
    """Yield growth that soon takes values out of range, or outputs below the required accuracy.

    What a step of the run shows is a finding of its own.
    """
    broken = any(row.origins or row.faults for row in context.record.steps)
    for growth in _harmful(context):
        site = _steps_site(context, growth)
        beyond = (growth.reaches or 0) > (context.step_count or 0)
        if site is not None and beyond and not broken:
            yield _growth_finding(context, growth, site)


def _harmful(context: CheckContext) -> Iterator[StepGrowth]:
    if context.steps is not None:
        yield from (growth for growth in context.steps.growth if growth.reaches is not None)


def _growth_finding(context: CheckContext, growth: StepGrowth, site: Site) -> Finding:
    count = context.step_count
    reached = f"at about step {growth.reaches}, beyond the {count} that were run"
    if growth.what == "error":
        cause = (
            f"the error of {growth.name} doubles every {format_number(growth.doubles_every)} steps; at this "
            f"rate its accuracy falls below {context.min_sqnr:.0f} dB {reached}"
        )
        advice = "keep in float32 what is carried from step to step, or run fewer steps"
    else:
        cause = (
            f"the values double every {format_number(growth.doubles_every)} steps; at this rate they leave "
            f"the range of {context.number_format.name} {reached}"
        )
        advice = "normalize what is carried from step to step, or keep it in float32"
    finding = finding_at(context, site, "AMP119", cause, advice)
    return replace(finding, evidence=replace(finding.evidence, step=count))


def _steps_site(context: CheckContext, growth: StepGrowth) -> Site | None:
    """Return the site of the values, or the one that makes the output."""
    site = next((site for name, site, _ in context.outputs if name == growth.name and site is not None), None)
    return context.site.get(site) if site is not None else context.site.get(SiteId(growth.name))


CHECKS = (
    Check("AMP118", find_between_steps),
    Check("AMP119", find_growth),
)
