"""Renders a check of several targets: one table for all, then the problems of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ampaudit.core import __version__
from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_control, format_bytes, listed, model_file, plural, shell_quoted
from ampaudit.findings.finding import KNOWN
from ampaudit.findings.pages import title_of
from ampaudit.render.blocks import Line, Section, facts, line, tabulate
from ampaudit.render.findings import Alert, Suite, relative_path
from ampaudit.render.view import Row, View
from ampaudit.report.check import CheckResults, TargetResult
from ampaudit.views.verdict import VERDICT_STYLES, verdict_section

_SHOWN = 12


class CheckView(View[CheckResults]):
    """A suite with a case per target; a row per target."""

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render a table of targets, then the breaches and errors of each with their next step."""
        results = self.document.targets
        metric = any(r.measured is not None and r.measured.metric_drop is not None for r in results)
        drop = ("metric drop",) if metric else ()
        heads = ("target", "", "headroom", "output", "FP32", *drop, "time", "memory")
        yield Section((tabulate(heads, [_cells(result, metric) for result in results], left=("",)),))
        for result in results:
            rows = list(_details(result))
            if rows:
                yield Section((facts(rows),), title=_name(result))
        failed = sum(result.verdict != "pass" for result in results)
        total = plural(len(results), "target")
        sentence = f"{failed} of {total}" if failed else f"{total} checked"
        yield verdict_section(self.document.verdict, f"{sentence}{self._baseline()}", self.gate)

    def suites(self) -> tuple[Suite, ...]:
        """Return all targets as one suite."""
        check = self.document
        names = list(map(_name, check.targets))
        suite = Suite(
            name=self.name,
            label="",
            extent=plural(len(names), "target"),
            verdict=check.verdict,
            gate=self.gate,
            cases=tuple(names),
            alerts=tuple(alert for target in check.targets for alert in _alerts(target)),
            tool_version=__version__,
            errors={name: t.error for name, t in zip(names, check.targets, strict=True) if t.error},
            seconds={name: t.seconds for name, t in zip(names, check.targets, strict=True)},
        )
        return (suite,)

    def rows(self) -> Iterator[Row]:
        """Return a row per target."""
        for target in self.document.targets:
            measured = target.measured
            names = ("headroom_bits", "headroom_site", "sqnr_db", "metric_fp32", "metric_lower", "fp32_share")
            yield {
                "target": _name(target),
                "verdict": target.verdict,
                "policy": target.policy,
                "dtype": target.dtype,
                **{name: getattr(measured, name, None) for name in names},
                "broken_outputs": len(measured.broken) if measured is not None else None,
                "breaches": len(target.breaches),
                "known": len(target.known),
                "seconds": target.seconds,
                "peak_bytes": target.peak_bytes or None,
            }

    def _baseline(self) -> str:
        """Count findings that the baseline hides, and entries of it that no longer occur."""
        hidden = sum(len(target.known) for target in self.document.targets)
        obsolete = sum(len(target.gone) for target in self.document.targets)
        text = f", {plural(hidden, 'known finding')}" if hidden else ""
        return text + (f", {obsolete} of the baseline no longer found" if obsolete else "")


def _name(result: TargetResult) -> str:
    absolute = Path(result.target).is_absolute()
    return escape_control(relative_path(result.target) if absolute else result.target)


def _details(result: TargetResult) -> Iterator[tuple[str, str]]:
    breaches = (*result.breaches, *result.ignored)
    for breach in breaches[:_SHOWN]:
        yield f"  {breach.budget}", f"{breach.where}: {breach.what}"
    if len(breaches) > _SHOWN:
        yield "", f"and {len(breaches) - _SHOWN} more"
    if result.known:
        yield "  known", _counted([(breach.budget, breach.where) for breach in result.known])
    if result.gone:
        places = _counted([(finding.code, finding.site) for finding in result.gone])
        yield "  gone", f"{places}: no longer found; update the baseline with --update-baseline"
    for number, text in enumerate(result.error.splitlines()):
        yield "" if number else "  error", text.strip()
    for note in result.notes:
        yield "  note", note


def _cells(result: TargetResult, metric: bool) -> list[str | Line]:
    measured = result.measured
    bits = measured.headroom_bits if measured else None
    drop = measured.metric_drop if measured else None
    return [
        _name(result),
        line((result.verdict.upper(), VERDICT_STYLES[result.verdict])),
        f"{bits:.1f} bits" if bits is not None else "",
        measured.accuracy if measured else "",
        f"{measured.fp32_share:.0%}" if measured else "",
        *([f"{drop:.3g}" if drop is not None else ""] if metric else []),
        f"{result.seconds:.1f} s",
        format_bytes(result.peak_bytes) if result.peak_bytes else "",
    ]


def _alerts(target: TargetResult) -> Iterator[Alert]:
    name = _name(target)
    model = SourceLine(model_file(target.target), 1)
    for breach in (*target.breaches, *target.ignored, *target.known):
        accepted = breach in target.known
        yield Alert(
            code=breach.budget,
            title=title_of(breach.budget, "budget exceeded"),
            level=breach.severity,
            fails=breach in target.breaches,
            case=name,
            site=breach.where,
            cause=escape_control(breach.what),
            advice=f"for details, run: ampaudit scan {shell_quoted(name)}",
            line=breach.source.user_line if breach.source is not None else model,
            suppressed=KNOWN if accepted else None,
        )


def _counted(findings: list[tuple[str, str]]) -> str:
    places = [f"{code} at {where}" for code, where in findings]
    return f"{plural(len(findings), 'known finding')}: {listed(places)}"
