"""Prepares the texts of a scan's page for its template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ampaudit.core.text import escape_control, format_scale, plural
from ampaudit.render.blocks import Section
from ampaudit.render.findings import Alert, Suite
from ampaudit.render.gradients import scales_that_suit
from ampaudit.render.scan_tables import against_sections, path_sections, summary_rows
from ampaudit.render.steps import step_sentences, steps_svg
from ampaudit.render.sweep import sweep_chart, sweep_sections
from ampaudit.render.verdict import verdict_words
from ampaudit.report.finding import CombinedPolicy, Severity
from ampaudit.report.model import Report

__all__ = ["MAX_FINDINGS", "ReportView", "Tile", "page_values"]

MAX_FINDINGS = 1000  # elements on the page; more would slow down browsers


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class ReportView:
    """The variables of one report.

    Attributes:
        report: The report.
        word: ``PASS``, ``FAIL`` or ``WARN``.
        sentence: Reason for the verdict.
        heading: Policy, format, mode and extent.
        gate: Gate and the option that sets it.
        culprit: Gravest error or warning; ``None`` without one.
        tiles: Key numbers at the top.
        findings: Findings, gravest first.
        left_out: Number of findings beyond ``MAX_FINDINGS``.
        facts: Labels and texts of the summary.
        scales: Summary of the loss scales; empty without gradients.
        combined: Policy that addresses all errors; ``None`` without one.
        steps: Charts of the steps and sentences about them; ``None`` for a single step.
        path: Lines of the model that branch on values.
        sweep: Results at each size.
        parts: Labels and sections of the comparison with a reference, and of the instruments.
        chart: SVG of the least headroom over the size.
    """

    report: Report
    word: str
    sentence: str
    heading: str
    gate: str
    culprit: Alert | None
    tiles: tuple[Tile, ...]
    findings: tuple[Alert, ...]
    left_out: int
    facts: tuple[tuple[str, str], ...]
    scales: str
    combined: CombinedPolicy | None
    steps: tuple[str, tuple[str, ...]] | None
    path: tuple[Section, ...]
    sweep: tuple[Section, ...]
    parts: tuple[tuple[str, tuple[Section, ...]], ...]
    chart: str


def page_values(reports: Sequence[tuple[Report, Suite, str]]) -> dict[str, Any]:
    """Return the template's values for each report, its findings, and how it was audited."""
    views = [_view(report, suite, heading) for report, suite, heading in reports]
    return {"views": views, "codes": {alert.code for view in views for alert in view.findings}}


def _view(report: Report, suite: Suite, heading: str) -> ReportView:
    alerts = suite.alerts
    word, sentence = verdict_words(report)
    return ReportView(
        report=report,
        word=word,
        sentence=sentence,
        heading=heading,
        gate=suite.gate,
        culprit=next((a for a in alerts if a.suppressed is None and a.level is not Severity.NOTE), None),
        tiles=tuple(_tiles(report)),
        findings=tuple(alerts[:MAX_FINDINGS]),
        left_out=len(alerts) - MAX_FINDINGS,
        facts=tuple(summary_rows(report, 0)),
        scales=scales_that_suit(report.backward) if report.backward is not None else "",
        combined=suite.combined,
        steps=None
        if report.steps is None
        else (steps_svg(report.steps), tuple(step_sentences(report.steps))),
        path=tuple(path_sections(report, len(report.path.lines))) if report.path is not None else (),
        sweep=tuple(sweep_sections(report.sweep)) if report.sweep is not None else (),
        parts=tuple(_parts(report)),
        chart=sweep_chart(report.sweep) if report.sweep is not None else "",
    )


def _parts(report: Report) -> Iterator[tuple[str, tuple[Section, ...]]]:
    if report.against is not None:
        yield "Reference", tuple(against_sections(report.against))
    for instrument, section in report.by_instrument:
        yield instrument.title, tuple(instrument.view(section, True))


def _tiles(report: Report) -> Iterator[Tile]:
    errors, warnings = report.count(Severity.ERROR), report.count(Severity.WARNING)
    cover, proofs, level = report.coverage, report.proofs, report.run.level
    yield Tile(
        "Errors", str(errors), plural(warnings, "warning"), "bad" if errors else "" if warnings else "good"
    )
    least = next(iter(report.by_headroom), None) if level == "ranges" else report.least_headroom
    if least is not None and least.headroom_bits is not None:
        bits = least.headroom_bits
        tone = "bad" if bits < 0 else "" if bits < 1 or errors else "good"
        yield Tile("Least headroom", f"{bits:.1f} bits", escape_control(least.site), tone)
    elif level == "scan":
        yield Tile("Least headroom", "none", "no site is held in 16 bits")
    if report.backward is not None:
        yield _gradients(report, report.backward.loss_scale)
    if level == "scan":
        yield _accuracy(report)
    if level == "static" and proofs is not None:
        yield Tile("Proved", _share(proofs.proved, proofs.sites), "of all sites; nothing was run")
    else:
        proved = f"; {proofs.proved} of {proofs.sites} proved" if proofs is not None else ""
        gaps = f"; {plural(len(report.gaps), 'gap')}" if report.gaps else ""
        note = f"{cover.audited} of {cover.sites} sites{proved}{gaps}"
        yield Tile("Audited", _share(cover.audited, cover.sites), note)
    if level == "scan":
        promoted = f"; {len(report.promoted)} promoted" if report.promoted else ""
        note = f"of {len(report.sites)}; {cover.casts} casts{promoted}"
        yield Tile("In 16 bits", plural(len(report.low_precision_sites), "site"), note)


def _gradients(report: Report, scale: float) -> Tile:
    """Return the gravest finding about gradients, else the gradient with the least headroom."""
    under = f"times the loss scale {format_scale(scale)}"
    finding = next((f for f in report.active if f.phase == "backward" and f.key_number), None)
    if finding is not None:
        tone = "bad" if finding.severity is Severity.ERROR else "warn"
        about = escape_control(finding.evidence.about or finding.site)
        return Tile("Gradients", finding.key_number, f"{about}, {under}", tone)
    headroom = (
        (s.gradient.headroom_bits, s.site) for s in report.sites if s.gradient and s.gradient.low_precision
    )
    least = min(((bits, site) for bits, site in headroom if bits is not None), default=None)
    if least is None:
        return Tile("Gradients", "float32", "no gradient is held in 16 bits")
    return Tile("Gradients", f"{least[0]:.1f} bits", f"{escape_control(least[1])}, {under}", "good")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "100%"


def _accuracy(report: Report) -> Tile:
    broken = report.broken_outputs
    against = "signal-to-noise ratio against FP32"
    if broken:
        note = f"{escape_control(broken[0].name)} holds infinity or NaN"
    elif report.worst_output is not None and len(report.outputs) > 1:
        note = f"{escape_control(report.worst_output.name)}, the least of {len(report.outputs)}; {against}"
    else:
        note = against
    return Tile("Output", report.accuracy, note, "bad" if broken else "")
