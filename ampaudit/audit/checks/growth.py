"""AMP119: error, or the size of values, grows exponentially over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding
from ampaudit.report.steps import StepGrowth
from ampaudit.trace import Site

__all__ = ["CHECK", "error_growth"]


def error_growth(context: CheckContext) -> StepGrowth | None:
    """Return the growth of an output's error, if it costs the required accuracy in the run or soon after."""
    return next((growth for growth in _harmful(context) if growth.what == "error"), None)


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield growth that soon takes values out of range, or outputs below the required accuracy.

    What a step of the run shows is a finding of its own.
    """
    broken = any(row.origins or row.faults for row in context.record.steps)
    for growth in _harmful(context):
        site = _site(context, growth)
        beyond = (growth.reaches or 0) > (context.step_count or 0)
        if site is not None and beyond and not broken:
            yield _finding(context, growth, site)


def _harmful(context: CheckContext) -> Iterator[StepGrowth]:
    if context.steps is not None:
        yield from (growth for growth in context.steps.growth if growth.reaches is not None)


def _finding(context: CheckContext, growth: StepGrowth, site: Site) -> Finding:
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
    found = finding_at(context, site, "AMP119", cause, advice)
    return replace(found, evidence=replace(found.evidence, step=count))


def _site(context: CheckContext, growth: StepGrowth) -> Site | None:
    """Return the site of the values, or the one that makes the output."""
    made = next((site for name, site, _ in context.outputs if name == growth.name and site is not None), None)
    return context.site.get(made) if made is not None else context.site.get(SiteId(growth.name))


CHECK = Check("AMP119", find)
