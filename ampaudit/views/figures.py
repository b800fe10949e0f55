"""Collects the data behind the charts of a page, by column to keep the file small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ampaudit.core.formats import format_named
from ampaudit.core.text import escape_control, format_scale, plural, short_op
from ampaudit.findings.finding import Severity
from ampaudit.render.blocks import Section
from ampaudit.render.findings import TOP, Suite, relative_path
from ampaudit.report.bench import PARTS, BenchReport
from ampaudit.report.gradients import BackwardReport
from ampaudit.report.model import Report, SiteReport
from ampaudit.views.scan_tables import (
    against_sections,
    path_sections,
    scales_that_suit,
    step_sentences,
    steps_svg,
    summary_rows,
    sweep_chart,
    sweep_sections,
)
from ampaudit.views.verdict import verdict_words

MAX_FINDINGS = 1000  # elements on the page; more would slow down browsers
_SHARES = 1e-4  # unit of a histogram's shares; smaller bars are invisible
_REPEATED_TEXTS = ("layer", "type", "op", "precision", "verdict", "rule", "why", "file", "findings", "worst")


def figure_data(report: Report) -> dict[str, Any]:
    """Return one report's data for the scripts: the format, a row per measured site, loss scales."""
    form = format_named(report.run.dtype)
    static = report.run.level == "static"  # bounds are the only numbers of a static report
    measured = [s for s in report.sites if s.forward or s.gradient or (static and s.bound is not None)]
    return {
        "dtype": form.name,
        "label": f"{escape_control(report.run.policy)}, {form.name}",
        "max": form.max,
        "minNormal": form.min_normal,
        "minSubnormal": form.min_subnormal,
        "level": report.run.level,
        "lossScale": report.backward.loss_scale if report.backward is not None else 1.0,
        "sites": _columns(list(_rows(report, measured))),
        "scales": _scales(report.backward) if report.backward is not None else None,
    }


def _rows(report: Report, sites: Sequence[SiteReport]) -> Iterable[dict[str, Any]]:
    codes = report.codes_by_site
    worst: dict[str, str] = {}
    wrong: dict[str, set[str]] = {"forward": set(), "backward": set()}
    evidence: dict[str, list[list[str]]] = {}
    for finding in report.active:
        if finding.evidence.in_words:
            measured = [finding.code, escape_control(finding.evidence.in_words)]
            for name in dict.fromkeys((finding.site, finding.evidence.about.removeprefix("gradient of "))):
                evidence.setdefault(name, []).append(measured)
        if finding.severity is not Severity.NOTE:  # the gravest come first
            worst.setdefault(finding.site, finding.severity.value)
        if finding.severity is Severity.ERROR:
            if finding.phase == "backward":
                wrong["backward"] |= {finding.site, *finding.poisons}
            else:
                wrong["forward"].add(finding.site)
    for site in sites:
        line = site.source.user_line if site.source is not None else None
        yield {
            "site": escape_control(site.site),
            "layer": escape_control(site.layer or TOP),
            "type": escape_control(site.layer_type),
            "op": escape_control(short_op(site.op)),
            "precision": site.precision,
            "verdict": site.verdict,
            "rule": escape_control(site.rule or site.role),
            "why": escape_control(site.why),
            "file": escape_control(relative_path(line.file)) if line is not None else "",
            "line": line.line if line is not None else 0,
            "findings": " ".join(dict.fromkeys(codes[site.site])),
            "evidence": evidence.get(site.site, []),
            "worst": worst.get(site.site, ""),
            "bad": int(site.site in wrong["forward"]),
            "gbad": int(site.site in wrong["backward"]),
            "weight": int(site.role == "weight-cast"),
            "design": int(site.by_design),
            "bound": _short(site.bound),
            **_forward(site),
            **_gradient(site),
        }


def _forward(site: SiteReport) -> dict[str, Any]:
    forward = site.forward
    return {
        "peak": _short(forward.peak if forward else None),
        "low": _short(forward.min_nonzero if forward else None),
        "head": _short(forward.headroom_bits if forward else None),
        "sqnr": _short(forward.sqnr_db if forward else None),
        "alone": _short(forward.local_sqnr_db if forward else None),
        "inf": forward.inf if forward else 0,
        "nan": forward.nan if forward else 0,
        "count": forward.elements if forward else 0,
        "bins": _bins(forward.exponents) if forward else [],
    }


def _gradient(site: SiteReport) -> dict[str, Any]:
    gradient = site.gradient
    return {
        "gpeak": _short(gradient.peak if gradient else None),
        "ghead": _short(gradient.headroom_bits if gradient else None),
        "glower": int(gradient is not None and gradient.low_precision),
        "gbroke": gradient.inf + gradient.nan if gradient else 0,
        "gcount": gradient.elements if gradient else 0,
        "gflushed": _short(gradient.flushed if gradient else None),
        "gbins": _bins(gradient.exponents) if gradient else [],
    }


def _bins(exponents: dict[int, int]) -> list[int]:
    """Return the first exponent, then the share of it and of each following one in units of 1e-4."""
    total = sum(exponents.values())
    visible = {e: n for e, n in exponents.items() if n >= _SHARES * total}
    if not visible:
        return []
    first, last = min(visible), max(visible)
    return [first, *(round(visible.get(e, 0) / total / _SHARES) for e in range(first, last + 1))]


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return columns; repeated texts are stored once, as a list and indices into it."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    for name in _REPEATED_TEXTS if rows else ():
        texts = list(dict.fromkeys(columns[name]))
        places = {text: index for index, text in enumerate(texts)}
        columns[name] = {"texts": texts, "at": [places[text] for text in columns[name]]}
    return columns


def _scales(backward: BackwardReport) -> dict[str, Any] | None:
    advice = backward.advice
    if advice is None:
        return None
    return {
        "scale": math.log2(backward.loss_scale),
        "low": advice.low,
        "high": advice.high,
        "suggested": backward.suggested,
        "rows": [[row.exponent, _short(row.flushed), row.overflowing] for row in advice.rows],
        "layers": [
            [
                escape_control(layer.layer or TOP),
                layer.low,
                layer.high,
                _short(layer.flushed),
                escape_control(layer.high_at),
            ]
            for layer in advice.layers
        ],
    }


def _short(value: float | None) -> float | None:
    """Round to four digits, the resolution of a picture, except what ``format_number`` shows in full."""
    if value is None or (float(value).is_integer() and abs(value) < 1e5):
        return value
    return float(f"{value:.4g}")


def bench_data(report: BenchReport) -> list[dict[str, Any]]:
    """Return a row per mode: megabytes by part, scaled to the measured peak, and samples per second."""
    several = len({row.batch_size for row in report.rows}) > 1
    ran = [row for row in report.rows if row.status == "ok" and row.seconds and row.least and row.most]
    data = []
    for row in ran:
        peak = (row.peak_bytes or 0) / 1e6
        whole = row.memory.peak if row.memory is not None else 0
        shares = {part: getattr(row.memory, part) / whole * peak for part in PARTS} if whole else {}
        mode = {
            "name": f"{row.mode}, {row.batch_size}" if several else row.mode,
            "peak": peak,
            "parts": shares or {"peak": peak},
            "speed": row.per_second,
            "slowest": row.batch_size / (row.most or 1.0),
            "fastest": row.batch_size / (row.least or 1.0),
            "finite": row.finite,
            "sqnr": row.sqnr_db,
        }
        data.append(mode)
    return data


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str
    tone: str = ""


def page_values(reports: Sequence[tuple[Report, Suite, str]]) -> dict[str, Any]:
    """Return the template's values for each report, its findings, and how it was audited."""
    views = [_view(report, suite, heading) for report, suite, heading in reports]
    return {"views": views, "codes": {alert.code for view in views for alert in view["findings"]}}


def _view(report: Report, suite: Suite, heading: str) -> dict[str, Any]:
    """Return the variables of one report; those that do not apply are empty, ``left_out`` may be negative."""
    alerts, steps, sweep, path = suite.alerts, report.steps, report.sweep, report.path
    word, sentence = verdict_words(report)
    return {
        "report": report,
        "word": word,
        "sentence": sentence,
        "heading": heading,
        "gate": suite.gate,
        "culprit": next((a for a in suite.active if a.level is not Severity.NOTE), None),
        "tiles": tuple(_tiles(report)),
        "findings": alerts[:MAX_FINDINGS],
        "left_out": len(alerts) - MAX_FINDINGS,
        "facts": tuple(summary_rows(report, 0)),
        "scales": scales_that_suit(report.backward) if report.backward is not None else "",
        "combined": suite.combined,
        "steps": (steps_svg(steps), tuple(step_sentences(steps))) if steps is not None else None,
        "path": tuple(path_sections(report, len(path.lines))) if path is not None else (),
        "sweep": tuple(sweep_sections(sweep)) if sweep is not None else (),
        "parts": tuple(_parts(report)),
        "chart": sweep_chart(sweep) if sweep is not None else "",
    }


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
        note = escape_control(f"{broken[0].name} {broken[0].fault}")
    elif report.worst_output is not None and len(report.outputs) > 1:
        note = f"{escape_control(report.worst_output.name)}, the least of {len(report.outputs)}; {against}"
    else:
        note = against
    return Tile("Output", report.accuracy, note, "bad" if broken else "")
