"""Renders the summary of a scan: coverage, proofs, precision, accuracy, memory, notes and time."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.core.formats import format_named
from ampaudit.core.text import escape_control, format_bytes, format_number, listed, plural, shell_quoted
from ampaudit.policy.schema import AS_IS
from ampaudit.report.accuracy import OutputAccuracy
from ampaudit.report.extrapolation import Proofs
from ampaudit.report.model import Report

__all__ = ["summary_rows", "weights_in_words"]

_OUTPUTS = 4


def summary_rows(report: Report, hidden: int, *, full: bool = True) -> Iterator[tuple[str, str]]:
    """Yield pairs of a label and a text.

    Args:
        report: Report of a scan.
        hidden: Number of notes that are not shown.
        full: Whether to include complete coverage and the default contract.
    """
    cover, run = report.coverage, report.run
    if run.inputs is not None and run.inputs.detail:
        yield "Inputs", escape_control(run.inputs.detail)
    if run.level != "static" and (full or report.gaps or cover.audited < cover.sites):
        measured = f"({cover.measured} measured, the others pass values on)"
        gaps = f"{plural(len(report.gaps), 'gap')}; "
        gaps += f"no rule mentions {plural(cover.no_rule, 'site')}"
        yield "Coverage", f"{cover.audited} of {cover.sites} floating-point sites audited {measured}; {gaps}"
    if report.proofs is not None:
        yield from _proofs(report, report.proofs)
    yield from _beyond_the_batches(report)
    if run.level == "scan":
        yield from _run(report, full=full)
    limits = format_named(run.dtype)
    smallest = f"smallest normal {limits.min_normal:.3g}"
    yield "Limits", f"{limits.name} ends at {format_number(limits.max)}, {smallest}"
    for note in report.notes:
        yield "Note", escape_control(note)
    if hidden:
        yield "Notes", f"{plural(hidden, 'more finding')} of severity note; -v shows them"
    if report.timings:
        yield "Time", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.timings.items())


def _run(report: Report, *, full: bool) -> Iterator[tuple[str, str]]:
    cover, dtype = report.coverage, report.run.dtype
    regions = (
        f"; {plural(cover.author_sites, 'site')} in autocast(enabled=False) regions of the code"
        if cover.author_sites
        else ""
    )
    casts, conversions = plural(cover.casts, "cast"), plural(cover.author_casts, "conversion")
    casts = f"{casts} inserted, {conversions} in the model's code{regions}"
    yield "Precision", f"{plural(len(report.low_precision_sites), 'site')} in {dtype}; {casts}"
    accuracies = listed(list(map(_accuracy, report.worst_outputs_first)), _OUTPUTS)
    yield "Outputs", f"signal-to-noise ratio against FP32: {accuracies}"
    yield "Weights", weights_in_words(report)
    backend = report.run.backend  # named after the contract, unless that is the default
    if backend != "native" and (full or backend != "emulated"):
        yield "Contract", report.run.contract


def _proofs(report: Report, proofs: Proofs) -> Iterator[tuple[str, str]]:
    over = sum(site.verdict == "overflows" for site in report.sites)
    ranges = ", ".join(
        f"{escape_control(a.name)} in {format_number(a.low)}:{format_number(a.high)} ({a.source})"
        for a in proofs.assumed
    )
    where = " along the path of these inputs" if report.path is not None else ""
    ran = report.run.level != "static" and proofs.proved < proofs.sites
    others = f"; of the others, {over or 'none'} overflowed in what was run" if ran else ""
    yield "Proofs", f"{proofs.proved} of {proofs.sites} sites proved{where}{others}"
    yield "Assumed", f"{ranges or 'nothing about inputs'}; {proofs.contract}"
    if proofs.uncovered_ops:
        yield "Unbounded", f"ops that no proof covers: {', '.join(proofs.uncovered_ops)}"


def _beyond_the_batches(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the results for other inputs: searches and tail estimates."""
    for s in report.stressed:
        outcome = f"overflows: --inputs {shell_quoted(s.file or '')}" if s.overflows else "no overflow found"
        reached = f"peak {format_number(s.seen)} raised to {format_number(s.reached)}"
        yield "Stress", f"{escape_control(s.site)}: {reached}; {outcome}"
    for t in report.tails:
        low, rate, high = (_rate(number) for number in (t.low, t.per_million, t.high))
        interval = f"90 %: {low} to {high}, from {t.batches} batches"
        yield "Tail", f"{escape_control(t.site)}: expected overflows per million samples: {rate} ({interval})"


def _rate(per_million: float) -> str:
    return "0" if per_million == 0 else "under 0.001" if per_million < 1e-3 else format_number(per_million)


def weights_in_words(report: Report) -> str:
    """Return the sizes of the weights, as they are stored or with the copies that the policy makes."""
    masters, copies = format_bytes(report.weights.master_bytes), format_bytes(report.weights.working_bytes)
    kind = "in 16 bits" if report.run.policy == AS_IS else "of 16-bit copies"
    return f"{masters} in FP32, {copies} {kind}"


def _accuracy(output: OutputAccuracy) -> str:
    repaired = " with FP32's values where it breaks" if output.repaired else ""
    return f"{escape_control(output.name)} {output.in_words}{repaired}"
