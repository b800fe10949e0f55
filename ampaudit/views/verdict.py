"""Summarizes a report in one line: what broke, or the evidence for a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ampaudit.core.text import escape_control, format_scale, plural
from ampaudit.findings.finding import (
    OTHER_CODE,
    OTHER_FUNCTION,
    GapKind,
    Severity,
    counts_in_words,
    gaps_in_words,
)
from ampaudit.render.blocks import Line, Section, line

if TYPE_CHECKING:
    from ampaudit.report.model import Report

VERDICT_STYLES = {"pass": "bold green", "fail": "bold red", "warn": "bold yellow", "error": "bold yellow"}


def verdict_section(
    verdict: str, sentence: str, gate: str = "", *, before: Iterable[Line] = (), wrap: bool = True
) -> Section:
    """Render a verdict with its sentence, followed by the gate if it disagrees with the verdict."""
    rows = [*before, line((verdict.upper(), VERDICT_STYLES[verdict]), f"  {sentence}", wrap=wrap)]
    if gate and gate.partition(" ")[0] != ("fail" if verdict == "fail" else "pass"):
        rows.append(line(("gate  ", "dim"), gate, wrap=wrap))
    return Section(tuple(rows))


def verdict_words(report: Report) -> tuple[str, str]:
    """Return the verdict in capitals, and the reason for it."""
    counts = counts_in_words(f.severity for f in report.active if f.severity is not Severity.NOTE)
    gaps = (escape_control(gaps_in_words(report.gaps)),) if report.gaps else ()
    first, *others = _reasons(report)
    what = "; ".join((f"{first} ({counts})" if counts else first, *gaps, *others))
    if report.sweep is not None:
        from ampaudit.views.scan_tables import sweep_words

        what += f"; {escape_control(sweep_words(report.sweep))}"
    made_up = f"; inputs: {report.run.made_up}" if report.run.made_up else ""
    if report.against is not None:
        what += f"; {report.against.extent}"
    path = "; along the path that these inputs take" if report.path is not None else ""
    hidden = counts_in_words(f.severity for f in report.findings if f.suppressed is not None)
    ignored = f"; ignored: {hidden}" if hidden else ""
    return report.verdict.upper(), f"{what}{ignored}{path}{made_up}"


def _reasons(report: Report) -> Iterator[str]:
    warnings, level = report.count(Severity.WARNING), report.run.level
    if report.count(Severity.ERROR):
        yield from _broken(report)
    elif level == "static" and report.proofs is not None:
        unproved = report.proofs.sites - report.proofs.proved
        yield f"{report.proofs.proved} of {report.proofs.sites} sites are proved safe in {report.run.dtype}"
        if unproved:
            yield f"a scan must observe the other {unproved}"
    elif level == "ranges" and warnings:
        yield f"{plural(warnings, 'site')} would overflow in {report.run.dtype}"
    else:
        yield from _sound(report)


def _broken(report: Report) -> Iterator[str]:
    errors = [f for f in report.active if f.severity is Severity.ERROR]
    flips = [f for f in errors if f.code == GapKind.OTHER_CODE.code]
    if flips:
        decide = "decides" if len(flips) == 1 else "decide"
        yield f"{plural(len(flips), 'line')} {decide} differently after overflow"
    others = [f for f in errors if f.code == OTHER_FUNCTION]
    if others and report.against is not None:
        yield _differing(len(others), report.against.reference)
    errors = [f for f in errors if f not in flips and f not in others]
    places = sum(not f.finite_error for f in errors)
    if places:
        first = report.steps.first_broken if report.steps is not None else None
        batches = {f.batch for f in errors if not f.finite_error}
        batch = batches.pop() if len(batches) == 1 else None
        when = f", first in {escape_control(batch)}" if batch else ""
        when = f", first at step {first.step}" if first is not None else when
        yield f"{plural(places, 'place')} break{'s' if places == 1 else ''} in {report.run.dtype}{when}"
    if places == len(errors):
        return
    worst = report.worst_output
    code = sum(f.code == OTHER_CODE for f in errors)
    broken = next((output for output in report.outputs if output.repaired), None)
    if broken is not None and not places and not code:  # no op makes it: it is that of an input
        yield escape_control(f"{broken.name} is infinite or NaN in {report.run.dtype}{broken.where}")
        return
    if code and (worst is None or worst.repaired):
        yield _differing(code, "FP32")
    elif worst is None:
        yield f"{plural(len(errors), 'buffer')} no longer changes in {report.run.dtype}"
    if worst is None:
        return
    if worst.problem:
        wrong = worst.problem
    elif worst.kind == "integer":
        wrong = f"differs from FP32 in {worst.differing:,} elements"
    else:
        wrong = f"has {worst.in_words} against FP32"
    wrong = escape_control(f"{worst.name} {wrong}{worst.where}")
    start = (
        "even with FP32's values there, " if worst.repaired else f"finite but wrong in {report.run.dtype}: "
    )
    yield f"{start}{wrong}"


def _differing(places: int, reference: str) -> str:
    computes = "computes" if places == 1 else "compute"
    return f"{plural(places, 'place')} {computes} something else than {escape_control(reference)}"


def _sound(report: Report) -> Iterator[str]:
    """Yield the evidence for a pass."""
    else_ = " else" if report.ignored(Severity.ERROR) else ""
    runs = bool(report.low_precision_sites) or report.run.level != "scan"
    yield f"nothing{else_} {'breaks' if runs else 'runs'} in {report.run.dtype}"
    if report.backward is not None and any(f.phase == "backward" and f.origin for f in report.active):
        scale = format_scale(report.backward.loss_scale)
        yield f"gradients overflow until the scaler lowers the loss scale {scale}"
    if report.run.level == "scan":
        yield from _accuracy(report)
    nearest = report.least_headroom
    if nearest is not None:
        bits = f"{nearest.headroom_bits:.1f} bits"
        batch = nearest.forward.batch if nearest.forward is not None else None
        where = escape_control(f"{nearest.site} in {batch}" if batch else nearest.site)
        yield f"the least headroom is {bits}, at {where}"
    if report.promoted:
        yield f"{plural(len(report.promoted), 'site')} promoted to float32"
    if report.proofs is not None:
        where = " along this path" if report.path is not None else ""
        yield f"{report.proofs.proved} of {report.proofs.sites} sites proved{where}"


def _accuracy(report: Report) -> Iterator[str]:
    """Describe the least accurate output, and the first output that is empty or constant."""
    blank = [o for o in report.outputs if o.empty or o.constant is not None]
    worst = report.worst_output
    if report.broken_outputs:
        yield f"{escape_control(report.broken_outputs[0].name)} is broken"
    elif worst is not None and worst not in blank:
        count = len({output.name for output in report.outputs})  # along other paths, other ops make them
        among = f", the least of {count}" if count > 1 else ""
        reference = " with the same weights" if report.stored_in_16_bits else ""
        against = "" if worst.kind == "integer" else f" against FP32{reference}"
        where = escape_control(worst.where)
        has = "has elements of which" if worst.kind == "integer" else "has"
        yield f"{escape_control(worst.name)} {has} {worst.in_words}{against}{where}{among}"
    elif len(blank) < len(report.outputs):
        yield "outputs are exact"
    for output in blank[:1]:
        more = f", and so are {len(blank) - 1} more" if len(blank) > 1 else ""
        yield f"{escape_control(output.name)} is {output.in_words}{more}"
