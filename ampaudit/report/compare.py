"""Compares two reports, site by site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from annotated_types import Ge

from ampaudit.core.config import Config, Option, path_argument, with_options
from ampaudit.core.errors import InputError
from ampaudit.core.text import escape_control, format_number
from ampaudit.findings.finding import Finding, Severity
from ampaudit.report.difference import Difference, Differences, Direction, ReportSummary, SiteChange
from ampaudit.report.documents import Document, read_document
from ampaudit.report.model import Comparison, Report, SiteReport

Saved = Report | Comparison | str | Path


class DiffConfig(Config):
    """Thresholds below which changes are not reported."""

    bits: Annotated[float, Ge(0), Option("Smallest change of headroom to report.")] = 0.5
    decibels: Annotated[float, Ge(0), Option("Smallest change of accuracy to report.", flags=("--db",))] = 3.0


def differences(old: Document, new: Document, config: DiffConfig) -> Differences:
    """Return all changes between two reports of scans, of one or several policies each.

    Raises:
        InputError: One of them is not a report of a scan, or they have no policy or no site in common.
    """
    before, after = _by_policy(old), _by_policy(new)
    if len(before) == len(after) == 1:  # two policies may be compared with each other
        before = dict.fromkeys(after, *before.values())
    if not before.keys() & after.keys():
        names = f"{', '.join(before)} and {', '.join(after)}"
        raise InputError(
            f"the two files have no policy in common: {names}", hint="scan under the same policy"
        )
    unpaired = [
        f"policy {escape_control(name)} is only in the {file} file"
        for file, names, others in (("old", before, after), ("new", after, before))
        for name in names
        if name not in others
    ]
    pairs = [_difference(before[name], after[name], unpaired, config) for name in after if name in before]
    return Differences(1, config.bits, config.decibels, tuple(pairs))


def _by_policy(document: Document) -> dict[str, Report]:
    if isinstance(document, Report):
        return {document.run.policy: document}
    if isinstance(document, Comparison):
        return {report.run.policy: report for report in document.reports}
    raise InputError(
        "only reports of scans can be compared", hint="ampaudit scan MODEL --format json -o FILE"
    )


def _difference(old: Report, new: Report, notes: Sequence[str], config: DiffConfig) -> Difference:
    before = {site.site: site for site in old.sites}
    after = {site.site: site for site in new.sites}
    both = [(before[name], site) for name, site in after.items() if name in before]
    if before and after and not both:
        models = f"{escape_control(old.model.source)} and {escape_control(new.model.source)}"
        raise InputError(
            f"the two files have no site in common: {models} are different models",
            hint="compare two reports of one model",
        )
    repaired = _repaired(old, new)
    by_site = [list(_site(a, b, config, b.site not in repaired)) for a, b in both]
    changes = [
        *_findings(old, new),
        *(c for site_changes in by_site for c in site_changes),
        *_outputs(old, new, config, repaired),
    ]
    order: dict[str, int] = {name: index for index, name in enumerate(after)}
    return Difference(
        old=_side(old),
        new=_side(new),
        changes=tuple(sorted(changes, key=lambda change: order.get(change.site, len(order)))),
        same=sum(not site_changes for site_changes in by_site),
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        notes=(*_notes(old, new), *notes),
    )


def _side(report: Report) -> ReportSummary:
    run = report.run
    return ReportSummary(report.model.source, run.policy, run.dtype, report.verdict, report.tool.version)


def _notes(old: Report, new: Report) -> Iterator[str]:
    names = ("policy", "dtype", "device", "backend", "batches", "seed", "level", "mode", "contract")
    pairs = [(name, getattr(old.run, name), getattr(new.run, name)) for name in names]
    pairs += [
        ("model", old.model.source, new.model.source),
        ("torch", old.environment.torch, new.environment.torch),
    ]
    for name, first, second in pairs:
        if first != second:
            yield f"{name} was {escape_control(str(first))}, is {escape_control(str(second))}"


def _findings(old: Report, new: Report) -> Iterator[SiteChange]:
    before, after = ({(f.code, f.site): f for f in report.active} for report in (old, new))
    for key, finding in after.items():
        was = before.get(key)
        title = f"{finding.severity.value} {finding.code}"
        if was is None:
            way: Direction = "other" if finding.severity is Severity.NOTE else "worse"
            yield _finding_change(finding, way, f"new {title}: {escape_control(finding.cause)}")
        elif was.severity is not finding.severity:
            way = "worse" if finding.severity.rank > was.severity.rank else "better"
            yield _finding_change(finding, way, f"{title} was of severity {was.severity.value}")
    for key, finding in before.items():
        if key not in after:
            way = "other" if finding.severity is Severity.NOTE else "better"
            yield _finding_change(
                finding,
                way,
                f"gone: {finding.severity.value} {finding.code}: {escape_control(finding.cause)}",
            )


def _finding_change(finding: Finding, way: Direction, what: str) -> SiteChange:
    return SiteChange(way, finding.layer, finding.site, what)


def _site(old: SiteReport, new: SiteReport, config: DiffConfig, sound: bool) -> Iterator[SiteChange]:
    layer, site = new.layer, new.site
    if old.precision != new.precision:
        yield SiteChange("other", layer, site, f"{old.precision} became {new.precision}")
    if (old.verdict == "proved") != (new.verdict == "proved") and None not in (old.bound, new.bound):
        way: Direction = "better" if new.verdict == "proved" else "worse"
        yield SiteChange(way, layer, site, f"{old.verdict} became {new.verdict}")
    was, now = old.forward, new.forward
    comparable = old.precision == new.precision and not new.by_design and sound
    if was is not None and now is not None and comparable:
        peaks = f"; peak {format_number(was.peak)} became {format_number(now.peak)}"
        yield from _number_change(
            layer, site, "headroom", was.headroom_bits, now.headroom_bits, config, peaks
        )
        yield from _number_change(layer, site, "accuracy", was.sqnr_db, now.sqnr_db, config)
    before, after = old.gradient, new.gradient
    if before is not None and after is not None and before.precision == after.precision != "float32":
        what = "headroom of its gradient"
        yield from _number_change(layer, site, what, before.headroom_bits, after.headroom_bits, config)


def _repaired(old: Report, new: Report) -> set[str]:
    """Return sites whose numbers cannot be compared, since a fault before them was repaired.

    After a fault, numbers are those of a repaired run. So numbers are compared neither at a fault and the
    sites that it poisons, nor after the first fault that only one of the two runs has.
    """
    sites: set[str] = set()
    faults = [{s.site for s in report.sites if s.verdict == "overflows"} for report in (old, new)]
    for report in (old, new):
        after = False
        for site in report.sites:
            after = after or site.site in faults[0] ^ faults[1]
            if after or site.verdict in ("overflows", "poisoned"):
                sites.add(site.site)
    return sites


def _number_change(
    layer: str,
    site: str,
    what: str,
    old: float | None,
    new: float | None,
    config: DiffConfig,
    more: str = "",
) -> Iterator[SiteChange]:
    """Yield the change of an accuracy or a headroom if it is large enough; ``None`` counts as infinite."""
    unit, slack = ("dB", config.decibels) if what == "accuracy" else ("bits", config.bits)
    first, second = (math.inf if value is None else value for value in (old, new))
    if first == second or abs(second - first) < slack:
        return
    was, now = ("unlimited" if value is None else f"{value:.1f} {unit}" for value in (old, new))
    way: Direction = "worse" if second < first else "better"
    yield SiteChange(way, layer, site, f"{what} {was} became {now}{more}", old, new)


def _outputs(old: Report, new: Report, config: DiffConfig, repaired: set[str]) -> Iterator[SiteChange]:
    before = {output.name: output for output in old.outputs}
    broken, fixed = ({o.name for o in report.broken_outputs} for report in (new, old))
    for output in new.outputs:
        was = before.get(output.name)
        if was is None or output.name in broken | fixed:
            if was is not None and (output.name in broken) != (output.name in fixed):
                worse = output.name in broken
                text = f"now {output.fault}" if worse else f"no longer {was.fault}"
                yield SiteChange("worse" if worse else "better", "", output.name, text)
        elif output.site not in repaired:
            yield from _number_change("", output.name, "accuracy", was.sqnr_db, output.sqnr_db, config)


@with_options(DiffConfig)
def diff(old: Saved, new: Saved, *, config: DiffConfig | None = None, **options: Any) -> Differences:
    """Compare two scan reports: show per layer what got better or worse.

    Args:
        old: A report, or the path of a saved one.
        new: The report to compare with it.
        config: Options as one record.
        **options: Fields of ``DiffConfig``, which override those of ``config``.

    Returns:
        The changes; its ``exit_code`` is 1 if anything is worse.

    Raises:
        UsageError: An option is invalid.
        InputError: One of them is not a report of a scan, or they have no policy in common.
    """
    return differences(_read(old), _read(new), DiffConfig.merged(config, options))


def read_report(path: str | Path) -> Document:
    """Read a report that was saved as JSON.

    Args:
        path: Path of a JSON file, or of a directory written by ``ampaudit convert``.

    Returns:
        The report; its type depends on the command that wrote it.

    Raises:
        InputError: The file is missing, truncated, of a newer schema, or not a report.
    """
    return read_document(path_argument(path, "path"))


def _read(report: Any) -> Document:
    return report if isinstance(report, get_args(Document)) else read_report(report)
