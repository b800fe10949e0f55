"""The tables of the text report: what came near the limit, what other formats would do, the summary."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from ampaudit.core.formats import format_named
from ampaudit.core.text import escape_control, format_bytes, format_number
from ampaudit.render.grid import labelled, open_table
from ampaudit.report.model import Report
from ampaudit.report.site import SiteReport

__all__ = [
    "all_sites",
    "changed_table",
    "nearest_table",
    "promoted_table",
    "summary",
    "summary_rows",
    "unproved_table",
    "what_if_table",
]


def _headroom(site: SiteReport) -> float:
    return site.headroom_bits or 0.0


def nearest_table(report: Report, count: int) -> Iterable[RenderableType]:
    """Healthy sites with the least headroom."""
    sites = report.nearest_sites
    if not sites:
        return
    yield Text(f"Nearest the limit, of {len(sites)} healthy sites in {report.run.dtype}", style="bold")
    columns = ("site", "peak", "headroom", "accuracy", *(("proved below",) if report.proofs else ()))
    table = open_table(*columns, width=36)
    for site in sites[:count]:
        assert site.forward is not None
        sqnr = site.forward.sqnr_db
        table.add_row(
            Text(escape_control(site.site), overflow="fold"),
            format_number(site.forward.peak),
            f"{_headroom(site):.1f} bits",
            "exact" if sqnr is None else f"{sqnr:.0f} dB",
            *((_proved(site),) if report.proofs else ()),
        )
    yield table


def _proved(site: SiteReport) -> str:
    """The bound where it is a proof."""
    return format_number(site.bound) if site.verdict == "proved" and site.bound is not None else "no"


def unproved_table(report: Report, count: int) -> Iterable[RenderableType]:
    """Sites without a proof, in graph order: the first decides what becomes of those after it."""
    sites = [s for s in report.sites if s.verdict != "proved"]
    if not sites:
        return
    shown = "; the first" if len(sites) > count * 2 else ""
    yield Text(f"Not proved: {len(sites)} site{'s' if len(sites) != 1 else ''}{shown}", style="bold")
    table = open_table("site", "bound", width=36)
    for site in sites[: count * 2]:
        known = "unbounded" if site.bound is None else format_number(site.bound)
        table.add_row(Text(escape_control(site.site), overflow="fold"), known)
    yield table


def changed_table(report: Report, count: int) -> Iterable[RenderableType]:
    """Verdicts that differ from those under the usual execution contract."""
    if not report.changed:
        return
    yield Text(f"Other verdicts than under the usual contract: {len(report.changed)} sites", style="bold")
    table = open_table("site", "usual", "here", width=36, left=("usual", "here"))
    for change in report.changed[: count * 2]:
        table.add_row(Text(escape_control(change.site), overflow="fold"), change.usual, change.here)
    yield table


def promoted_table(report: Report, count: int) -> Iterable[RenderableType]:
    """Sites that the policy keeps in float32 because of their values: without that, some would break."""
    promoted = set(report.promoted)
    sites = [s for s in report.sites if s.site in promoted]
    if not sites:
        return
    limit = format_named(report.run.dtype).max
    over = sum(s.forward is not None and s.forward.peak > limit for s in sites)
    beyond = f"; {over} of them pass {format_number(limit)}" if over else ""
    title = f"Promoted to float32 because of their values: {len(sites)} sites{beyond}"
    yield Text(title, style="bold")
    table = open_table("site", "peak", "headroom", "rule", width=36, left=("rule",))
    for site in sorted(sites, key=lambda s: s.forward.peak if s.forward else 0.0, reverse=True)[:count]:
        seen = site.forward
        bits = f"{seen.headroom_bits:+.1f} bits" if seen and seen.headroom_bits is not None else ""
        peak = format_number(seen.peak) if seen else ""
        table.add_row(
            Text(escape_control(site.site), overflow="fold"), peak, bits, escape_control(site.rule or "")
        )
    yield table
    if len(sites) > count:
        yield Text(f"and {len(sites) - count} more; -v lists every site with its rule", "dim")


def what_if_table(report: Report, count: int) -> Iterable[RenderableType]:
    """FP32 values against every format, for ``--ranges``."""
    sites = [s for s in report.sites if s.what_if is not None]
    yield Text(f"What if: FP32 values of {len(sites)} sites against each format", style="bold")
    yield Text(
        "sites that overflow, sites that lose over 1 % of their values to zero, the least headroom", "dim"
    )
    table = open_table("format", "overflow", "vanish", "headroom", "least at", left=("least at",))
    for name in sites[0].what_if or {} if sites else {}:
        cases = [(s, s.what_if[name]) for s in sites if s.what_if is not None]
        over = sum(case.overflows for _, case in cases)
        vanish = sum(case.vanish > 0.01 for _, case in cases)
        bits = [(case.headroom_bits, s.site) for s, case in cases if case.headroom_bits is not None]
        least, where = min(bits, default=(0.0, ""))
        table.add_row(
            name, str(over), str(vanish), f"{least:.1f} bits", Text(escape_control(where), overflow="fold")
        )
    yield table
    nearest = sorted(_measured(sites), key=_headroom)[:count]
    if nearest:
        yield Text()
        yield Text(f"Largest values, with headroom in {report.run.dtype}", style="bold")
        table = open_table("site", "peak", "headroom")
        for site in nearest:
            peak = site.forward.peak if site.forward else 0.0
            table.add_row(
                Text(escape_control(site.site), overflow="fold"),
                format_number(peak),
                f"{_headroom(site):+.1f} bits",
            )
        yield table


def _measured(sites: list[SiteReport]) -> list[SiteReport]:
    return [s for s in sites if s.forward is not None and s.forward.headroom_bits is not None]


def summary(report: Report, hidden: int) -> Iterable[RenderableType]:
    """Coverage, precision, accuracy, memory, notes and time."""
    yield labelled(summary_rows(report, hidden))


def summary_rows(report: Report, hidden: int) -> list[tuple[str, str]]:
    """The same as pairs of a label and what is said."""
    cover, weights = report.coverage, report.weights
    rows = [
        (
            "Coverage",
            f"{cover.audited} of {cover.sites} floating-point sites audited ({cover.measured} measured, the "
            f"others hand values on); {len(cover.uncovered_ops)} ops not covered; no rule mentions "
            f"{cover.no_rule} sites",
        )
    ]
    if report.run.level == "static":
        rows.clear()
    rows += [*_proof_rows(report), *_beyond_rows(report)]
    if report.run.level == "scan":
        lowered = sum(site.precision == report.run.dtype for site in report.sites)
        own = (
            f"; {cover.author_sites} sites in the author's autocast(enabled=False)"
            if cover.author_sites
            else ""
        )
        rows.append(
            (
                "Precision",
                f"{lowered} sites in {report.run.dtype}; {cover.casts} casts inserted, "
                f"{cover.author_casts} conversions of the author's own{own}",
            )
        )
        rows.append(("Outputs", _outputs(report)))
        rows.append(
            (
                "Weights",
                f"{format_bytes(weights.master_bytes)} of FP32 masters, "
                f"{format_bytes(weights.working_bytes)} of 16-bit copies",
            )
        )
    if report.run.level == "scan" and report.run.backend != "native":
        rows.append(("Contract", report.run.contract))
    limits = format_named(report.run.dtype)
    rows.append(
        (
            "Limits",
            f"{limits.name} ends at {format_number(limits.max)}, smallest normal {limits.min_normal:.3g}",
        )
    )
    rows += [("Note", escape_control(note)) for note in report.notes]
    if hidden:
        rows.append(
            ("Notes", f"{hidden} more finding{'s' if hidden != 1 else ''} of severity note; -v shows them")
        )
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.timings.items())
    if spent:
        rows.append(("Time", spent))
    return rows


def _proof_rows(report: Report) -> list[tuple[str, str]]:
    proofs = report.proofs
    if proofs is None:
        return []
    over = sum(site.verdict == "overflows" for site in report.sites)
    watched = "not proved" if report.run.level == "static" else "observed only"
    rest = max(proofs.sites - proofs.proved - over, 0)
    ranges = ", ".join(
        f"{escape_control(a.name)} in {format_number(a.low)}:{format_number(a.high)} ({a.source})"
        for a in proofs.assumed
    )
    rows = [
        ("Proofs", f"{proofs.proved} of {proofs.sites} sites proved, {rest} {watched}, {over} overflow"),
        ("Assumed", f"{ranges or 'nothing about inputs'}; {proofs.contract}"),
    ]
    if proofs.uncovered_ops:
        rows.append(("Unbounded", f"ops that no proof covers: {', '.join(proofs.uncovered_ops)}"))
    return rows


def _beyond_rows(report: Report) -> list[tuple[str, str]]:
    """What was found, or is to be expected, beyond the given batches."""
    rows: list[tuple[str, str]] = []
    for s in report.stressed:
        found = f"overflows: --inputs {s.file}" if s.overflows else "no overflow found"
        reached = f"peak {format_number(s.seen)} raised to {format_number(s.reached)}"
        rows.append(("Stress", f"{escape_control(s.site)}: {reached}; {escape_control(found)}"))
    for t in report.tails:
        rate = f"{format_number(t.per_million)} expected overflows per million samples"
        interval = f"(90 %: {format_number(t.low)} to {format_number(t.high)}, from {t.batches} batches)"
        rows.append(("Tail", f"{escape_control(t.site)}: {rate} {interval}"))
    return rows


def _outputs(report: Report) -> str:
    shown = [f"{escape_control(o.name)} {o.in_words}" for o in report.outputs[:4]]
    more = f" and {len(report.outputs) - 4} more" if len(report.outputs) > 4 else ""
    repaired = ", with the faults repaired" if any(f.origin for f in report.findings) else ""
    return f"signal to error against FP32{repaired}: {', '.join(shown)}{more}"


def all_sites(report: Report) -> Iterable[RenderableType]:
    """Every floating-point site, for ``-v``."""
    yield Text("All sites", style="bold")
    table = open_table("site", "precision", "peak", "headroom", "accuracy", "alone", "rule", left=("rule",))
    for site in report.sites:
        seen = site.forward
        table.add_row(
            Text(escape_control(site.site), overflow="fold"),
            site.precision,
            format_number(seen.peak) if seen else "",
            f"{seen.headroom_bits:.1f}" if seen and seen.headroom_bits is not None else "",
            f"{seen.sqnr_db:.0f}" if seen and seen.sqnr_db is not None else "",
            f"{seen.local_sqnr_db:.0f}" if seen and seen.local_sqnr_db is not None else "",
            escape_control(site.rule or site.role),
        )
    yield table
