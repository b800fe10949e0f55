"""Renders several policies on one model for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control, format_bytes, short_op
from ampaudit.render.gradient_tables import scales_that_suit
from ampaudit.render.grid import open_table
from ampaudit.report.finding import Severity
from ampaudit.report.model import Report

__all__ = ["render_comparison"]

_SHOWN = 4


def render_comparison(reports: Sequence[Report]) -> RenderableType:
    """One row per policy, then what breaks under each."""
    first = reports[0]
    heading = (
        f"{escape_control(first.model.source)}: {len(reports)} policies "
        f"in {first.run.dtype}, {first.run.mode} mode, "
        f"on {first.run.device} ({first.run.backend}), against "
        + ("FP32" if first.backward is not None else "one FP32 run")
    )
    table = open_table(
        *("policy", "", "breaks", "least headroom", "output", "16-bit sites", "casts", "weights"), left=("",)
    )
    for report in reports:
        table.add_row(*_row(report))
    parts: list[RenderableType] = [Text(heading, "bold"), Text(), table]
    for report in reports:
        broken = [f for f in report.findings if f.severity is Severity.ERROR]
        if broken:
            names = [f"{escape_control(f.layer or '(top)')} {escape_control(short_op(f.op))}" for f in broken]
            shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
            parts += [Text(), Text.assemble((f"{report.run.policy}  ", "bold"), f"breaks at {shown}")]
        if report.backward is not None:
            parts += [
                Text(),
                Text.assemble((f"{report.run.policy}  ", "bold"), scales_that_suit(report.backward)),
            ]
        if report.promoted:
            why = f"{len(report.promoted)} sites promoted to float32 because of their values"
            parts += [Text(), Text.assemble((f"{report.run.policy}  ", "bold"), why)]
    return Group(*parts)


def _row(report: Report) -> list[str | Text]:
    errors = report.count(Severity.ERROR)
    least = report.least_headroom
    bits = f"{least.forward.headroom_bits:.1f} bits" if least and least.forward else ""
    lowered = sum(site.precision == report.run.dtype for site in report.sites)
    verdict = Text("PASS", "bold green") if report.exit_code == 0 else Text("FAIL", "bold red")
    return [
        report.run.policy,
        verdict,
        str(errors) if errors else "",
        bits,
        report.accuracy,
        f"{lowered} of {len(report.sites)}",
        str(report.coverage.casts),
        format_bytes(report.weights.working_bytes) if report.weights.working_bytes else "FP32",
    ]
