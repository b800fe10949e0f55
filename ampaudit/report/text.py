"""The report for people: verdict, what broke, what came near, what was looked at."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampaudit.checks.finding import Finding, Severity
from ampaudit.checks.interface import number
from ampaudit.formats import format_named
from ampaudit.report.model import Report, SiteReport

__all__ = ["plain", "print_report", "render"]

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_TITLES = {
    "AMP101": "overflow",
    "AMP102": "little headroom",
    "AMP103": "out of domain",
    "AMP104": "saturated mask",
    "AMP110": "would overflow",
    "AMP401": "weight out of range",
    "AMP601": "forbidden op",
    "AMP901": "not covered",
}
_POISONS_SHOWN = 3


def print_report(report: Report, console: Console, *, verbosity: int = 0, nearest: int = 5) -> None:
    """Print to a console; ``verbosity`` -1 is the verdict line alone, 1 adds every site."""
    console.print(render(report, verbosity=verbosity, nearest=nearest))


def render(report: Report, *, verbosity: int = 0, nearest: int = 5) -> RenderableType:
    """The report as something that rich can print."""
    if verbosity < 0:
        return _verdict(report)
    parts: list[RenderableType] = [_heading(report), Text(), _verdict(report)]
    shown = [f for f in report.findings if verbosity > 0 or f.severity is not Severity.NOTE]
    for position, finding in enumerate(shown, 1):
        parts += [Text(), _finding(finding, position)]
    hidden = len(report.findings) - len(shown)
    if report.run.level == "ranges":
        parts += [Text(), *_what_if_table(report, nearest)]
    else:
        parts += [Text(), *_nearest_table(report, nearest)]
    parts += [Text(), *_summary(report, hidden)]
    if verbosity > 0:
        parts += [Text(), *_all_sites(report)]
    return Group(*parts)


def plain(name: str) -> str:
    """A name from a model, safe to print: control and escape characters are shown, not obeyed."""
    return "".join(
        char if unicodedata.category(char)[0] != "C" else char.encode("unicode_escape").decode()
        for char in name
    )


def _heading(report: Report) -> Text:
    run = report.run
    batches = f"{run.batches} batch{'es' if run.batches != 1 else ''}"
    what = "FP32 ranges" if run.level == "ranges" else f"policy {run.policy}, {run.dtype}"
    line = f"{plain(report.model.source)}: {what}, {run.mode} mode, {batches} on {run.device} ({run.backend})"
    return Text.assemble(("ampaudit ", "bold"), (report.tool.version, "bold"), "  ", line)


def _verdict(report: Report) -> Text:
    errors, warnings = report.count(Severity.ERROR), report.count(Severity.WARNING)
    dtype = report.run.dtype
    if errors:
        what = f"{errors} place{'s' if errors != 1 else ''} break{'s' if errors == 1 else ''} in {dtype}"
    elif report.run.level == "ranges" and warnings:
        what = f"{warnings} site{'s' if warnings != 1 else ''} would overflow in {dtype}"
    else:
        what = f"nothing breaks in {dtype}"
        least = _least_headroom(report)
        if least is not None:
            what += f"; the least headroom is {least.forward.headroom_bits:.1f} bits" if least.forward else ""
            what += f", at {plain(least.site)}"
    extra = f" ({warnings} warning{'s' if warnings != 1 else ''})" if warnings and errors else ""
    word, style = ("FAIL", "bold red") if report.verdict == "fail" else ("PASS", "bold green")
    if report.verdict == "pass" and (errors or (report.run.level == "ranges" and warnings)):
        word, style = "LOOK", "bold yellow"
    return Text.assemble((word, style), f"  {what}{extra}")


def _finding(finding: Finding, position: int) -> RenderableType:
    title = _TITLES.get(finding.code, finding.kind)
    lines: list[RenderableType] = [
        Text.assemble(
            f"{position:>2}  ",
            (plain(finding.layer or "(top module)"), "bold"),
            f"  {plain(_short_op(finding.op))}  ",
            (f"{finding.code} {title}", _STYLES[finding.severity]),
        )
    ]
    body: list[RenderableType] = []
    if finding.source is not None:
        body.append(_source_line(finding.source.file, finding.source.line, finding.source.code))
        if finding.source.caller is not None:
            caller = finding.source.caller
            body.append(
                Text.assemble(("called from ", "dim"), _source_line(caller.file, caller.line, caller.code))
            )
    body.append(Text(_evidence(finding)))
    body.append(Text.assemble(("why   ", "dim"), plain(finding.cause)))
    if finding.poisons:
        body.append(Text.assemble(("then  ", "dim"), _poisons(finding.poisons)))
    body.append(Text.assemble(("next  ", "dim"), plain(finding.advice)))
    return Group(*lines, Padding(Group(*body), (0, 0, 0, 4), expand=False))


def _source_line(file: str, line: int, code: str) -> Text:
    return Text.assemble((f"{plain(_relative(file))}:{line}", "cyan"), f"  {plain(code)}" if code else "")


def _relative(file: str) -> str:
    """Below the working directory, or from the package's directory on, or as it is."""
    _, packages, inside = file.rpartition("site-packages/")
    if packages:
        return inside
    relative = os.path.relpath(file, Path.cwd())
    return file if relative.startswith("..") else relative


def _evidence(finding: Finding) -> str:
    seen = finding.evidence
    parts: list[str] = []
    if seen.peak is not None and seen.limit is not None:
        parts.append(f"peak {number(seen.peak)}, limit {number(seen.limit)}")
    if seen.headroom_bits is not None:
        parts.append(f"headroom {seen.headroom_bits:+.2f} bits")
    for count, name in ((seen.inf, "inf"), (seen.nan, "NaN")):
        if count:
            parts.append(f"{count} of {seen.elements} elements became {name}")
    return "; ".join(parts)


def _poisons(poisons: tuple[str, ...]) -> str:
    shown = ", ".join(plain(site) for site in poisons[:_POISONS_SHOWN])
    more = len(poisons) - _POISONS_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"poisons {len(poisons)} later site{'s' if len(poisons) != 1 else ''}: {shown}{rest}"


def _lowered(report: Report) -> list[SiteReport]:
    measured = [s for s in report.sites if s.forward is not None and s.forward.headroom_bits is not None]
    lowered = [s for s in measured if s.precision == report.run.dtype and s.role != "weight-cast"]
    return [s for s in lowered if not s.by_design]


def _least_headroom(report: Report) -> SiteReport | None:
    sites = _lowered(report)
    return min(sites, key=_headroom, default=None)


def _headroom(site: SiteReport) -> float:
    assert site.forward is not None
    assert site.forward.headroom_bits is not None
    return site.forward.headroom_bits


def _nearest_table(report: Report, count: int) -> Iterable[RenderableType]:
    bad = {f.site for f in report.findings if f.severity is not Severity.NOTE}
    sites = [s for s in _lowered(report) if s.verdict == "observed" and s.site not in bad]
    if not sites:
        return
    yield Text(f"Nearest the limit, of {len(sites)} healthy sites in {report.run.dtype}", style="bold")
    table = _table("site", "peak", "headroom", "accuracy", width=36)
    for site in sorted(sites, key=_headroom)[:count]:
        assert site.forward is not None
        sqnr = site.forward.sqnr_db
        table.add_row(
            Text(plain(site.site), overflow="fold"),
            number(site.forward.peak),
            f"{_headroom(site):.1f} bits",
            "exact" if sqnr is None else f"{sqnr:.0f} dB",
        )
    yield table


def _what_if_table(report: Report, count: int) -> Iterable[RenderableType]:
    sites = [s for s in report.sites if s.what_if is not None]
    yield Text(f"What if: FP32 values of {len(sites)} sites against each format", style="bold")
    yield Text(
        "sites that overflow, sites that lose over 1 % of their values to zero, the least headroom", "dim"
    )
    table = _table("format", "overflow", "vanish", "headroom", "least at")
    for name in sites[0].what_if or {} if sites else {}:
        cases = [(s, s.what_if[name]) for s in sites if s.what_if is not None]
        over = sum(case.overflows for _, case in cases)
        vanish = sum(case.vanish > 0.01 for _, case in cases)
        bits = [(case.headroom_bits, s.site) for s, case in cases if case.headroom_bits is not None]
        least, where = min(bits, default=(0.0, ""))
        table.add_row(name, str(over), str(vanish), f"{least:.1f} bits", Text(plain(where), overflow="fold"))
    yield table
    nearest = sorted(_measured(sites), key=_headroom)[:count]
    if nearest:
        yield Text()
        yield Text(f"Largest values, with headroom in {report.run.dtype}", style="bold")
        table = _table("site", "peak", "headroom")
        for site in nearest:
            peak = site.forward.peak if site.forward else 0.0
            table.add_row(
                Text(plain(site.site), overflow="fold"), number(peak), f"{_headroom(site):+.1f} bits"
            )
        yield table


def _measured(sites: list[SiteReport]) -> list[SiteReport]:
    return [s for s in sites if s.forward is not None and s.forward.headroom_bits is not None]


def _summary(report: Report, hidden: int) -> Iterable[RenderableType]:
    cover, weights = report.coverage, report.weights
    rows = [
        (
            "Coverage",
            f"{cover.audited} of {cover.sites} floating-point sites audited ({cover.measured} measured, the "
            f"others hand values on); {len(cover.uncovered_ops)} ops not covered; 0 proved",
        )
    ]
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
                f"{_bytes(weights.master_bytes)} masters, {_bytes(weights.working_bytes)} of 16-bit copies",
            )
        )
    limits = format_named(report.run.dtype)
    rows.append(
        (
            "Limits",
            f"{limits.name} ends at {number(limits.max)}, smallest normal {limits.min_normal:.3g}",
        )
    )
    rows += [("Note", plain(note)) for note in report.notes]
    if hidden:
        rows.append(
            ("Notes", f"{hidden} more finding{'s' if hidden != 1 else ''} of severity note; -v shows them")
        )
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.timings.items())
    if spent:
        rows.append(("Time", spent))
    grid = Table.grid(padding=(0, 2))
    for label, text in rows:
        grid.add_row(Text(label, style="bold"), Text(text))
    yield grid


def _outputs(report: Report) -> str:
    shown = [
        f"{plain(o.name)} {'exact' if o.sqnr_db is None else f'{o.sqnr_db:.0f} dB'}"
        for o in report.outputs[:4]
    ]
    more = f" and {len(report.outputs) - 4} more" if len(report.outputs) > 4 else ""
    repaired = ", with the faults repaired" if any(f.origin for f in report.findings) else ""
    return f"signal to error against FP32{repaired}: {', '.join(shown)}{more}"


def _all_sites(report: Report) -> Iterable[RenderableType]:
    yield Text("All sites", style="bold")
    table = _table("site", "precision", "peak", "headroom", "accuracy", "alone", "rule")
    for site in report.sites:
        seen = site.forward
        table.add_row(
            Text(plain(site.site), overflow="fold"),
            site.precision,
            number(seen.peak) if seen else "",
            f"{seen.headroom_bits:.1f}" if seen and seen.headroom_bits is not None else "",
            f"{seen.sqnr_db:.0f}" if seen and seen.sqnr_db is not None else "",
            f"{seen.local_sqnr_db:.0f}" if seen and seen.local_sqnr_db is not None else "",
            plain(site.rule or site.role),
        )
    yield table


def _table(*columns: str, width: int | None = None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for index, name in enumerate(columns):
        left = index == 0 or name in ("least at", "rule")
        table.add_column(name, justify="left" if left else "right", min_width=width if index == 0 else None)
    return table


def _short_op(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
