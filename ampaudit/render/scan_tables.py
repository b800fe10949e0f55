"""Renders the tables of a scan: sites near the limit, other formats, all sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from ampaudit.core.formats import format_named
from ampaudit.core.text import escape_control, format_bytes, format_number, listed, plural, shell_quoted
from ampaudit.policy.schema import AS_IS
from ampaudit.render.blocks import Block, Line, Section, Table, line, tabulate
from ampaudit.report.extrapolation import Proofs
from ampaudit.report.model import AgainstReport, OutputAccuracy, Report, SiteReport

__all__ = [
    "against_sections",
    "all_sites",
    "level_sections",
    "path_sections",
    "summary_rows",
    "weights_in_words",
]

_OUTPUTS = 4
_SHOWN = 5
_WIDTH = 36


def level_sections(report: Report, count: int) -> Iterator[Section]:
    """Render the tables for the level of the report, with about ``count`` sites each."""
    if report.run.level == "ranges":
        yield from _what_if(report, count)
    elif report.run.level == "static":
        yield from _unproved(report, 2 * count)
    else:
        yield from path_sections(report, 2 * count)
        yield from _promoted(report, count)
        yield from _changed(report, 2 * count)
        yield from _nearest(report, count)


def _nearest(report: Report, count: int) -> Iterator[Section]:
    """Render the healthy sites with the least headroom."""
    sites = report.nearest_sites
    if not sites:
        return
    rows = []
    has_batches = any(site.forward is not None and site.forward.batch for site in sites)
    for site in sites[:count]:
        assert site.forward is not None
        sqnr = site.forward.sqnr_db
        bound = format_number(site.bound) if site.verdict == "proved" and site.bound is not None else "no"
        rows.append(
            (
                escape_control(site.site),
                format_number(site.forward.peak),
                f"{site.headroom_bits:.1f} bits",
                "exact" if sqnr is None else f"{sqnr:.0f} dB",
                *((escape_control(site.forward.batch or ""),) if has_batches else ()),
                *((bound,) if report.proofs else ()),
            )
        )
    heads = ("site", "peak", "headroom", "accuracy", *(("peak in",) if has_batches else ()))
    heads += ("proved below",) if report.proofs else ()
    title = f"Nearest the limit, of {len(sites)} healthy sites in {report.run.dtype}"
    yield Section((tabulate(heads, rows, width=_WIDTH),), title)


def _unproved(report: Report, count: int) -> Iterator[Section]:
    """Render unproved sites in graph order, since the first ones affect those after them."""
    sites = [s for s in report.sites if s.verdict != "proved"]
    if not sites:
        return
    rows = (
        (escape_control(site.site), "unbounded" if site.bound is None else format_number(site.bound))
        for site in sites[:count]
    )
    more = "; the first" if len(sites) > count else ""
    table = tabulate(("site", "bound"), rows, width=_WIDTH)
    yield Section((table,), f"Not proved: {plural(len(sites), 'site')}{more}")


def _changed(report: Report, count: int) -> Iterator[Section]:
    """Render verdicts that differ from those under the default execution contract."""
    if not report.changed:
        return
    rows = ((escape_control(change.site), change.usual, change.here) for change in report.changed[:count])
    table = tabulate(("site", "usual", "here"), rows, left=("usual", "here"), width=_WIDTH)
    title = f"Verdicts that differ from the default contract: {plural(len(report.changed), 'site')}"
    yield Section((table,), title)


def _promoted(report: Report, count: int) -> Iterator[Section]:
    """Render the sites that are promoted to float32 because of their values."""
    promoted = set(report.promoted)
    sites = [s for s in report.sites if s.site in promoted]
    if not sites:
        return
    limit = format_named(report.run.dtype).max
    over = sum(s.forward is not None and s.forward.peak > limit for s in sites)
    beyond = f"; {over} of them exceed {format_number(limit)}" if over else ""
    rows = []
    for site in sorted(sites, key=lambda s: s.forward.peak if s.forward else 0.0, reverse=True)[:count]:
        bits = f"{site.headroom_bits:+.1f} bits" if site.headroom_bits is not None else ""
        peak = format_number(site.forward.peak) if site.forward else ""
        rows.append((escape_control(site.site), peak, bits, escape_control(site.rule or "")))
    heads = ("site", "peak", "headroom", "rule")
    blocks: list[Block] = [tabulate(heads, rows, left=("rule",), width=_WIDTH)]
    if len(sites) > count:
        more = f"and {len(sites) - count} more; -v lists every site with its rule"
        blocks.append(line(more, style="dim"))
    title = f"Promoted to float32 because of their values: {plural(len(sites), 'site')}{beyond}"
    yield Section(tuple(blocks), title)


def path_sections(report: Report, count: int) -> Iterator[Section]:
    """Render the lines that branch on tensor values; those that would branch differently first."""
    if report.path is None or not report.path.lines:
        return
    dtype, lines = report.run.dtype, sorted(report.path.lines, key=lambda read: not read.differing)
    rows = []
    for read in lines[:count]:
        place = read.source.evident if read.source is not None else None
        where = f"{PurePath(place.file).name}:{place.line}" if place is not None else read.layer or "(top)"
        decides = "the same way" if not read.differing else f"differently, {read.differing} of {read.reads}"
        decides = {"array": "values leave torch", "number": "follows FP32's number"}.get(read.kind, decides)
        rows.append((escape_control(where), read.name, f"{read.reads:,}", read.fp32, read.low, decides))
    heads = ("line", "reads by", "times", "FP32", dtype, "decides in 16 bits")
    blocks: list[Block] = [tabulate(heads, rows, left=("reads by", "decides in 16 bits"))]
    if len(lines) > count:
        blocks.append(line(f"and {len(lines) - count} more lines", style="dim"))
    paths = "" if report.path.count == 1 else f", which take {report.path.count} paths"
    yield Section(tuple(blocks), f"Decided by values: the audit follows FP32 on these inputs{paths}")


def _what_if(report: Report, count: int) -> Iterator[Section]:
    """Compare FP32 values with every format, for ``--ranges``."""
    sites = [s for s in report.sites if s.what_if is not None and not s.by_design]
    what = (
        "sites that overflow, sites that lose over 1 % of their values to zero, the least headroom; "
        "without masks and constants"
    )
    title = f"What if: FP32 values of {len(sites)} sites against each format"
    yield Section((line(what, style="dim"), _format_table(sites)), title)
    measured = [s for s in sites if s.headroom_bits is not None]
    rows = [
        (
            escape_control(site.site),
            format_number(site.forward.peak if site.forward else 0.0),
            f"{site.headroom_bits:+.1f} bits",
        )
        for site in sorted(measured, key=lambda s: s.headroom_bits or 0.0)[:count]
    ]
    if rows:
        title = f"Largest values, with headroom in {report.run.dtype}"
        yield Section((tabulate(("site", "peak", "headroom"), rows),), title)


def _format_table(sites: list[SiteReport]) -> Table:
    rows = []
    for name in sites[0].what_if or {} if sites else {}:
        cases = [(s, s.what_if[name]) for s in sites if s.what_if is not None]
        over = sum(case.overflows for _, case in cases)
        vanish = sum(case.vanish > 0.01 for _, case in cases)
        bits = [(case.headroom_bits, s.site) for s, case in cases if case.headroom_bits is not None]
        least, where = min(bits, default=(0.0, ""))
        rows.append((name, str(over), str(vanish), f"{least:.1f} bits", escape_control(where)))
    return tabulate(("format", "overflow", "vanish", "headroom", "least at"), rows, left=("least at",))


def all_sites(report: Report) -> Section:
    """Render every floating-point site, for ``-v``."""
    heads = ("site", "precision", "peak", "headroom", "accuracy", "alone", "rule")
    return Section((tabulate(heads, _site_rows(report), left=("rule",)),), "All sites")


def _site_rows(report: Report) -> Iterable[tuple[str, ...]]:
    for site in report.sites:
        forward = site.forward
        yield (
            escape_control(site.site),
            site.precision,
            format_number(forward.peak) if forward else "",
            f"{forward.headroom_bits:.1f}" if forward and forward.headroom_bits is not None else "",
            f"{forward.sqnr_db:.0f}" if forward and forward.sqnr_db is not None else "",
            f"{forward.local_sqnr_db:.0f}" if forward and forward.local_sqnr_db is not None else "",
            escape_control(site.rule or site.role),
        )


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


def against_sections(against: AgainstReport, *, full: bool = False) -> Iterator[Section]:
    """Render the ops that only one model has; with ``full``, also each matched pair."""
    reference = escape_control(against.reference)
    rows = [
        ("only here", _listed(against.only_here, full=full)),
        (f"only in {reference}", _listed(against.only_reference, full=full)),
    ]
    text = [line((f"{label}: ", "bold"), sites) for label, sites in rows if sites]
    yield Section((line(against.extent), *text), f"Against {reference}")
    if full and against.matched:
        pairs: list[list[str | Line]] = [
            [line((escape_control(pair.site), "code")), line((escape_control(pair.counterpart), "code"))]
            for pair in against.matched
        ]
        yield Section((tabulate(("op", "counterpart"), pairs, left=("op", "counterpart")),))


def _listed(sites: Sequence[str], *, full: bool) -> str:
    return listed(list(map(escape_control, sites)), len(sites) if full else _SHOWN)
