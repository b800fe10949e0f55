"""Renders several policies on one model, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.core.text import escape_control, format_bytes, listed, plural, short_op
from ampaudit.findings.finding import Severity, gaps_in_words
from ampaudit.render.blocks import Line, Section, line, tabulate
from ampaudit.render.findings import MARKS, Suite
from ampaudit.render.view import Row, Strip, View, ViewPage
from ampaudit.report.model import Comparison, Report
from ampaudit.views.scan import ScanView, reports_page
from ampaudit.views.scan_tables import scales_that_suit, sweep_words
from ampaudit.views.verdict import VERDICT_STYLES

_SHOWN = 4


class ComparisonView(View[Comparison]):
    """A suite per policy; a row per site and policy."""

    def __init__(self, document: Comparison) -> None:
        super().__init__(document)
        self.scans = [ScanView(report) for report in document.reports]

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render one row per policy, then what breaks under each."""
        reports = self.document.reports
        first, run = reports[0], reports[0].run
        against = "FP32" if first.backward is not None else "one FP32 run"
        what = f"{len(reports)} policies in {run.dtype}, {run.mode} mode"
        what += f", {run.made_up}" if run.made_up else ""
        where = f"on {run.device} ({run.backend}), against {against}"
        yield Section((line(f"{self.scans[0].name}: {what}, {where}", style="bold"),))
        heads = ("policy", "", "breaks", "least headroom", "output", "16-bit sites", "casts", "weights")
        yield Section((tabulate(heads, map(_cells, reports), left=("",)),))
        for report in reports:
            for remark in _remarks(report):
                yield Section((line((f"{report.run.policy}  ", "bold"), remark),))
        for report in reports:
            for instrument, part in report.by_instrument:
                for section in instrument.view(part, verbosity > 0):
                    yield replace(section, title=f"{report.run.policy}: {section.heading}")

    @property
    def name(self) -> str:
        """The model of the reports."""
        return self.scans[0].name

    def subject(self) -> str:
        """Return what the policies have in common."""
        run = self.document.reports[0].run
        return f"{len(self.scans)} policies in {run.dtype}, {run.mode} mode"

    def strips(self) -> Iterator[Strip]:
        """Return the strips of each policy."""
        for scan in self.scans:
            for strip in scan.strips():
                yield replace(strip, label=f"{escape_control(scan.document.run.policy)}: {strip.label}")

    def suites(self) -> tuple[Suite, ...]:
        """Return a suite per policy."""
        return tuple(suite for scan in self.scans for suite in scan.suites())

    def rows(self) -> Iterator[Row]:
        """Return a row per site and policy."""
        for scan in self.scans:
            yield from scan.rows()

    def digest(self) -> Iterator[Section | Suite]:
        """Render the policies side by side, then the digest of each."""
        rows = []
        for report in self.document.reports:
            verdict = MARKS[report.verdict]
            breaks = str(report.count(Severity.ERROR))
            policy = line((report.run.policy, "code"))
            rows.append((policy, verdict, breaks, _bits(report), report.accuracy))
        heads = ("policy", "", "breaks", "least headroom", "output")
        yield Section((tabulate(heads, rows, left=("",)),), "Policies side by side", level=2)
        for scan in self.scans:
            yield from scan.digest()

    def page(self) -> ViewPage:
        """Return the page of a scan, with a choice of policies."""
        return reports_page(self.document.reports)


def _remarks(report: Report) -> Iterator[str]:
    broken = [f for f in report.findings if f.severity is Severity.ERROR]
    if broken:
        names = [f"{f.layer or '(top)'} {short_op(f.op)}" for f in broken]
        yield f"breaks at {listed(names, _SHOWN)}"
    if report.sweep is not None:
        yield sweep_words(report.sweep)
    if report.backward is not None:
        yield scales_that_suit(report.backward)
    if report.gaps:
        yield gaps_in_words(report.gaps)
    if report.promoted:
        yield f"{plural(len(report.promoted), 'site')} promoted to float32 because of their values"


def _bits(report: Report) -> str:
    least = report.least_headroom
    return f"{least.headroom_bits:.1f} bits" if least is not None else ""


def _cells(report: Report) -> list[str | Line]:
    errors, copies = report.count(Severity.ERROR), report.weights.working_bytes
    return [
        report.run.policy,
        line((report.verdict.upper(), VERDICT_STYLES[report.verdict])),
        str(errors) if errors else "",
        _bits(report),
        report.accuracy,
        f"{len(report.low_precision_sites)} of {len(report.sites)}",
        str(report.coverage.casts),
        format_bytes(copies) if copies else "FP32",
    ]
