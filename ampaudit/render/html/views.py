"""What the page says in words, taken out of a report once, so that the template only arranges it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ampaudit.core.text import escape_control, short_op
from ampaudit.render.evidence import (
    evidence_text,
    evident_line,
    ran_on,
    relative_path,
    title_of,
    trial_text,
)
from ampaudit.render.gradient_tables import scales_that_suit
from ampaudit.render.tables import summary_rows
from ampaudit.render.verdict import verdict_words
from ampaudit.report.finding import Finding
from ampaudit.report.model import Report

__all__ = ["FindingView", "Line", "ReportView", "Tile", "view_of"]

MAX_FINDINGS = 1000  # as elements of the page; more would make a browser slow
_PATH_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A source line: where, and what it says."""

    place: str
    code: str


@dataclass(frozen=True, slots=True)
class FindingView:
    """One finding. All texts may be printed: names have no control characters."""

    code: str
    title: str
    severity: str
    layer: str
    op: str
    site: str
    evidence: str
    short: str
    cause: str
    advice: str
    lines: tuple[Line, ...]
    path: tuple[str, ...]
    path_more: int
    cures: tuple[tuple[str, str, str, str, str], ...]
    suppressed: str
    fate: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class ReportView:
    """One report.

    Attributes:
        report: itself.
        word: ``PASS``, ``FAIL`` or ``WARN``.
        sentence: what the verdict is about.
        heading: how it was audited.
        tiles: the numbers at the top.
        findings: the gravest first.
        left_out: findings beyond those.
        facts: label and text of everything else a reader may ask.
        scales: the loss scales in a sentence; empty without gradients.
    """

    report: Report
    word: str
    sentence: str
    heading: str
    tiles: tuple[Tile, ...]
    findings: tuple[FindingView, ...]
    left_out: int
    facts: tuple[tuple[str, str], ...]
    scales: str


def view_of(report: Report) -> ReportView:
    """The words of one report."""
    word, sentence = verdict_words(report)
    active = Counter(f.severity.value for f in report.findings if f.suppressed is None)
    run = report.run
    shown = report.findings[:MAX_FINDINGS]
    return ReportView(
        report=report,
        word=word,
        sentence=sentence,
        heading=f"policy {escape_control(run.policy)}, {run.dtype}, {run.mode} mode, {ran_on(run)}",
        tiles=tuple(_tiles(report, active)),
        findings=tuple(map(_finding, shown)),
        left_out=len(report.findings) - len(shown),
        facts=tuple(summary_rows(report, 0)),
        scales=scales_that_suit(report.backward) if report.backward is not None else "",
    )


def _tiles(report: Report, active: Counter[str]) -> list[Tile]:
    errors, warnings = active["error"], active["warning"]
    cover = report.coverage
    tiles = [
        Tile(
            "Errors",
            str(errors),
            f"{warnings} warning{'s' if warnings != 1 else ''}",
            "bad" if errors else "good",
        )
    ]
    least = next(iter(report.by_headroom), None) if report.run.level == "ranges" else report.least_headroom
    if least is not None and least.forward is not None and least.forward.headroom_bits is not None:
        bits = least.forward.headroom_bits
        tone = "bad" if bits < 0 else "" if bits < 1 else "good"
        tiles.append(Tile("Least headroom", f"{bits:.1f} bits", escape_control(least.site), tone))
    if report.run.level == "scan":
        tiles.append(_accuracy(report))
    if report.run.level == "static" and report.proofs is not None:
        tiles.append(
            Tile("Proved", _share(report.proofs.proved, report.proofs.sites), "of all sites; nothing was run")
        )
    else:
        proved = (
            f"; {report.proofs.proved} of {report.proofs.sites} proved" if report.proofs is not None else ""
        )
        note = f"{cover.audited} of {cover.sites} sites{proved}"
        tiles.append(Tile("Audited", _share(cover.audited, cover.sites), note))
    if report.run.level == "scan":
        lowered = sum(site.precision == report.run.dtype for site in report.sites)
        note = (
            f"{cover.casts} casts; {len(report.promoted)} promoted"
            if report.promoted
            else f"{cover.casts} casts"
        )
        tiles.append(Tile("In 16 bits", f"{lowered} sites", f"of {len(report.sites)}; {note}"))
    return tiles


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "100%"


def _accuracy(report: Report) -> Tile:
    broken = report.broken_outputs
    note = (
        f"{escape_control(broken[0].name)} holds infinity or NaN"
        if broken
        else "signal to error against FP32"
    )
    return Tile("Output", report.accuracy, note, "bad" if broken else "")


def _finding(finding: Finding) -> FindingView:
    source, line = finding.source, evident_line(finding.source)
    places = [line] if line is not None else []
    if source is not None:
        others = ((source.file, source.line, source.code), *_caller(finding))
        places += [type(line)(*o) for o in others if line is not None and o[:2] != (line.file, line.line)]
    path = finding.poisons[:_PATH_SHOWN]
    return FindingView(
        code=finding.code,
        title=title_of(finding.code, finding.kind),
        severity=finding.severity.value if finding.suppressed is None else "suppressed",
        layer=escape_control(finding.layer or "(top module)"),
        op=escape_control(short_op(finding.op)),
        site=escape_control(finding.site),
        evidence=evidence_text(finding),
        short=f"{bits:+.1f} bits" if (bits := finding.evidence.headroom_bits) is not None else "",
        cause=escape_control(finding.cause),
        advice=escape_control(finding.advice),
        lines=tuple(
            Line(f"{escape_control(relative_path(p.file))}:{p.line}", escape_control(p.code)) for p in places
        ),
        path=tuple(map(escape_control, path)),
        path_more=len(finding.poisons) - len(path),
        cures=tuple(
            (
                t.outcome,
                escape_control(trial_text(t)),
                _lines(t.diff or t.paste),
                escape_control(t.before),
                escape_control(t.after),
            )
            for t in finding.tried
        ),
        suppressed=finding.suppressed or "",
        fate=finding.fate or "",
    )


def _caller(finding: Finding) -> list[tuple[str, int, str]]:
    caller = finding.source.caller if finding.source is not None else None
    return [(caller.file, caller.line, caller.code)] if caller is not None else []


def _lines(text: str) -> str:
    return "\n".join(escape_control(line) for line in text.splitlines())
