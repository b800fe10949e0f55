"""Renders a scan under one policy: verdict, findings, sites near the limit, and coverage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ampaudit.core.instruments import instruments
from ampaudit.core.text import escape_control, format_number, short_op
from ampaudit.findings.finding import Severity, gaps_in_words, threshold
from ampaudit.render.blocks import Section, facts, headline, line, tabulate
from ampaudit.render.findings import TOP, Suite, alert_of, combined_section, finding_sections, relative_path
from ampaudit.render.view import Cell, Row, Strip, View, ViewPage
from ampaudit.report.model import Report, SiteReport
from ampaudit.views.scan_tables import (
    against_sections,
    all_sites,
    gradient_sections,
    level_sections,
    path_sections,
    scales_that_suit,
    step_section,
    summary_rows,
    sweep_sections,
    weights_in_words,
)
from ampaudit.views.verdict import verdict_section, verdict_words

_FINDINGS = 25
_NEAREST = 5
_SCRIPTS = (
    *("values.js", "theme.js", "marks.js", "range.js", "detail.js", "strip.js", "scales.js", "findings.js"),
    "main.js",
)


class ScanView(View[Report]):
    """A suite with a case per layer; a row per site."""

    about = "model.source"

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the verdict, findings, tables of the level that was run, and a summary."""
        report, run, full = self.document, self.document.run, verbosity > 0
        _, sentence = self.verdict()
        verdict = verdict_section(report.verdict, sentence, self.gate)
        if verbosity < 0:
            yield verdict
            return
        yield headline(report.tool.version, f"{self.name}: {self.subject()}")
        yield verdict
        if report.sweep is not None:
            yield from sweep_sections(report.sweep, full=full)
        (suite,) = self.suites()
        active = suite.active
        visible = [alert for alert in active if full or alert.level is not Severity.NOTE]
        limit = len(visible) if full else _FINDINGS
        yield from finding_sections(visible[:limit])
        if len(visible) > limit:
            more = f"and {len(visible) - limit:,} more findings; -v shows all"
            yield Section((line(more, style="bold"),))
        if suite.combined is not None:
            yield combined_section(suite.combined)
        if report.against is not None:
            yield from against_sections(report.against, full=full)
        if report.steps is not None:
            yield step_section(report.steps, full=full)
        yield from level_sections(report, _NEAREST)
        for instrument, section in report.by_instrument:
            yield from instrument.view(section, full)
        if report.backward is not None:
            yield from gradient_sections(report.backward, run.dtype, _NEAREST, full=full)
        yield Section((facts(summary_rows(report, len(active) - len(visible), full=full)),))
        if full:
            yield all_sites(report)

    def verdict(self) -> tuple[str, str]:
        """Return the verdict and its reason."""
        return verdict_words(self.document)

    def subject(self) -> str:
        """Return policy, format, mode and extent."""
        run = self.document.run
        what = "FP32 ranges" if run.level == "ranges" else f"policy {escape_control(run.policy)}, {run.dtype}"
        beside = self.document.against
        against = f", against {escape_control(beside.reference)}" if beside is not None else ""
        return f"{what}{against}, {run.mode} mode, {run.extent}"

    def strips(self) -> Iterator[Strip]:
        """Yield the strip of the values, then that of the gradients; empty strips are left out."""
        report = self.document
        wrong: dict[bool, set[str]] = {True: set(), False: set()}
        for finding in report.active:
            if finding.severity is Severity.ERROR:
                wrong[finding.phase == "backward"] |= {finding.site, *finding.poisons}
        values = [
            (forward.headroom_bits, site.site in wrong[False] or forward.inf + forward.nan > 0, site.site)
            for site in report.low_precision_sites
            if (forward := site.forward) and forward.headroom_bits is not None
            if site.role != "weight-cast" and not site.by_design
        ]
        gradients = [
            (gradient.headroom_bits, site.site in wrong[True] or gradient.inf + gradient.nan > 0, site.site)
            for site in report.sites
            if (gradient := site.gradient) and gradient.low_precision and gradient.headroom_bits is not None
        ]
        for label, cells in (("headroom over depth", values), ("gradients times the loss scale", gradients)):
            if cells:
                yield Strip(label, tuple(cells))

    def suites(self) -> tuple[Suite, ...]:
        """Return the layers as one suite."""
        report = self.document
        rank = threshold(report.fail_on)
        failing = {(gap.kind.code, gap.site) for gap in report.gaps if report.fail_on == "gap"}
        layers = [site.layer for site in report.sites if site.forward is not None]
        layers += [finding.layer for finding in report.findings]
        calls = _calls(report.sites)
        suite = Suite(
            name=self.name,
            label=f"{report.run.policy}, {report.run.dtype}"
            + (", along the path of these inputs" if report.path is not None else ""),
            verdict=report.verdict,
            gate=self.gate,
            cases=tuple(layer or TOP for layer in dict.fromkeys(layers)),
            alerts=tuple(
                alert_of(
                    f,
                    f.layer or TOP,
                    0 if (f.code, f.site) in failing else rank,
                    call=calls.get(f.site, ""),
                    # --advise cannot be combined with --backward, and without that there is no loss
                    advised=report.advised or report.backward is not None,
                )
                for f in report.findings
            ),
            tool_version=report.tool.version,
            inputs=report.run.made_up,
            seconds={"": sum(report.timings.values())} if report.timings else {},
            combined=report.combined,
            gaps=gaps_in_words(report.gaps),
        )
        return (suite,)

    def rows(self) -> Iterator[Row]:
        """Return a row per site."""
        codes = self.document.codes_by_site
        run = self.document.run
        columns = {name: None for instrument in instruments() for name in instrument.columns}
        cells = [each.cells(section) for each, section in self.document.by_instrument]
        for index, site in enumerate(self.document.sites):
            source = site.source
            yield {
                "policy": run.policy,
                "dtype": run.dtype,
                "index": index,
                **_fields(site, ("site", "layer", "layer_type", "op", "role", "precision")),
                "shape": "x".join(map(str, site.shape)),
                **_fields(site, ("rule", "reason", "verdict")),
                "by_design": int(site.by_design),
                "findings": " ".join(codes[site.site]),
                **_measured(site),
                **columns,
                **{name: cell for by_site in cells for name, cell in by_site.get(site.site, {}).items()},
                "file": relative_path(source.file) if source is not None else None,
                "line": source.line if source is not None else None,
                "inputs": run.inputs.origin if run.inputs is not None else None,
            }

    def digest(self) -> Iterator[Section | Suite]:
        """Return the suite, the sites nearest the limit, and the numbers of the run."""
        report = self.document
        yield from self.suites()
        if report.sweep is not None:
            yield from sweep_sections(report.sweep)
        nearest = [
            (
                line((escape_control(site.site), "code")),
                format_number(forward.peak),
                f"{forward.headroom_bits:.1f} bits",
            )
            for site in report.nearest_sites[:_NEAREST]
            if (forward := site.forward)
        ]
        if report.against is not None:
            yield from against_sections(report.against)
        if report.steps is not None:
            yield step_section(report.steps)
        if nearest:
            yield Section((tabulate(("site", "peak", "headroom"), nearest),), "Nearest the limit")
        yield from path_sections(report, _FINDINGS)
        for instrument, section in report.by_instrument:
            yield from instrument.view(section, False)
        yield Section((facts(("", fact) for fact in _numbers(report)),))

    def page(self) -> ViewPage:
        """Return charts of every site, findings with their pages, and a summary."""
        return reports_page((self.document,))


def reports_page(reports: Sequence[Report]) -> ViewPage:
    """Return a page for one policy, or for several to choose from."""
    from ampaudit.views.figures import figure_data, page_values

    data = [figure_data(report) for report in reports]
    scans = [ScanView(report) for report in reports]
    views = [(scan.document, scan.suites()[0], scan.subject()) for scan in scans]
    return ViewPage("page.html.j2", _SCRIPTS, data, page_values(views))


def _numbers(report: Report) -> Iterator[str]:
    cover, weights = report.coverage, report.weights
    yield f"{cover.audited} of {cover.sites} floating-point sites audited"
    if report.proofs is not None:
        where = " along this path" if report.path is not None else ""
        yield f"{report.proofs.proved} of {report.proofs.sites} proved{where}"
    if report.promoted:
        yield f"{len(report.promoted)} promoted to float32 because of their values"
    if weights.working_bytes:
        yield f"weights {weights_in_words(report)}"
    if report.backward is not None:
        yield scales_that_suit(report.backward)
    yield report.run.extent


def _calls(sites: Sequence[SiteReport]) -> Mapping[str, str]:
    """Describe by site which call of its op it is, if the op occurs several times on the line."""
    of_line: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for site in sites:
        if site.source is not None:
            place = site.source.file, str(site.source.line)
            of_line[site.layer, site.op, site.role, *place].append(site.site)
    return {
        name: f"call {number} of {len(names)} of {short_op(key[1])} on this line"
        for key, names in of_line.items()
        if len(names) > 1
        for number, name in enumerate(names, 1)
    }


def _fields(value: object, names: Sequence[str]) -> Mapping[str, Cell]:
    return {name: getattr(value, name, None) for name in names}


def _measured(site: SiteReport) -> Mapping[str, Cell]:
    counts = ("peak", "min_nonzero", "headroom_bits", "inf", "nan", "elements", "sqnr_db", "local_sqnr_db")
    shares = ("max_error", "max_relative_error", "flushed", "subnormal")
    gradient = _fields(
        site.gradient, ("precision", "peak", "headroom_bits", "inf", "nan", "flushed", "sqnr_db")
    )
    return {
        **_fields(site.forward, (*counts, *shares)),
        "bound": site.bound,
        **{f"gradient_{name}": value for name, value in gradient.items()},
    }
