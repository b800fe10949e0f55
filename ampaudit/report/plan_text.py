"""A plan, and two plans side by side, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampaudit.report.grid import open_table
from ampaudit.report.plan import PlannedSite, PlanReport, pattern_of
from ampaudit.report.words import plain, short_op, size_of

__all__ = ["matching_sites", "render_difference", "render_plan", "totals"]

_QUIET_ROLES = ("view", "select")


def matching_sites(plan: PlanReport, layer: str | None) -> tuple[PlannedSite, ...]:
    """The plan's sites in the layers that a glob matches; all without a glob."""
    return tuple(s for s in plan.sites if layer is None or fnmatchcase(s.layer, layer))


def render_plan(plan: PlanReport, *, layer: str | None = None, verbose: bool = False) -> RenderableType:
    """Heading, one row per op (equal ops of a stack's layers as one), the rules, the totals."""
    sites = matching_sites(plan, layer)
    shown = [s for s in sites if verbose or s.role not in _QUIET_ROLES or s.casts]
    parts: list[RenderableType] = [
        Text.assemble(
            ("plan  ", "bold"),
            f"{plain(plan.model)}: policy {plan.policy}, {plan.dtype}; nothing was run in {plan.dtype}",
        ),
        Text(),
        _site_table(shown, verbose),
    ]
    if len(shown) < len(sites):
        hidden = len(sites) - len(shown)
        parts.append(Text(f"and {hidden} sites that only hand on values; -v shows them", "dim"))
    if layer is not None:
        parts += [Text(), Text("below, the rules of these layers and the totals of the whole model", "dim")]
    return Group(*parts, Text(), _rule_table(plan, sites), Text(), _totals(plan))


def _site_table(sites: Sequence[PlannedSite], verbose: bool) -> Table:
    made = open_table(
        "site", "times", "precision", "casts", "bytes", "rule", width=24, left=("precision", "rule")
    )
    for row in _collapsed(sites, verbose):
        site = row.sites[0]
        made.add_row(
            Text(plain(row.name), overflow="fold"),
            str(len(row.sites)) if len(row.sites) > 1 else "",
            Text(site.precision, "bold" if site.precision != "float32" else ""),
            str(sum(s.casts for s in row.sites) or ""),
            size_of(sum(s.cast_bytes for s in row.sites)) if any(s.casts for s in row.sites) else "",
            Text(plain(site.rule or "(default)"), overflow="fold"),
        )
    return made


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    sites: tuple[PlannedSite, ...]


def _collapsed(sites: Sequence[PlannedSite], verbose: bool) -> Iterable[_Row]:
    """Sites of the same place in different layers of a stack as one row, at the first of them."""
    groups: dict[tuple[str, ...], list[PlannedSite]] = {}
    for site in sites:
        name = site.site if verbose else pattern_of(site.site)
        groups.setdefault((name, site.precision, site.rule or "", site.op), []).append(site)
    for key, members in groups.items():
        yield _Row(key[0] if len(members) > 1 else members[0].site, tuple(members))


def _rule_table(plan: PlanReport, sites: Sequence[PlannedSite]) -> Table:
    counts = Counter(site.rule for site in sites)
    made = open_table("rule", "sites", "reason", "why", left=("reason", "why"))
    for use in plan.rules:
        if counts[use.rule]:
            name = Text(plain(use.rule or "(default)"), overflow="fold")
            made.add_row(name, str(counts[use.rule]), use.reason, Text(plain(use.why)))
    return made


def _totals(plan: PlanReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    for label, text in totals(plan):
        grid.add_row(Text(label, style="bold"), Text(text))
    return grid


def totals(plan: PlanReport) -> list[tuple[str, str]]:
    """Precision, casts and weights in words."""
    weights = plan.weights
    masters = f"; training keeps {size_of(weights.masters)} of FP32 masters beside them"
    other = f", {plan.other} in another dtype" if plan.other else ""
    rows = [
        ("Precision", f"{plan.lower} computing sites in {plan.dtype}, {plan.float32} in float32{other}"),
        (
            "Casts",
            f"{plan.casts} inserted, moving {size_of(plan.cast_bytes)} per forward pass of this batch; "
            f"{plan.author_casts} of the author's own",
        ),
        (
            "Weights",
            f"{size_of(weights.before)} before, {size_of(weights.after)} after conversion"
            f"{masters if weights.masters else ''}",
        ),
    ]
    return rows + [("Note", plain(note)) for note in plan.notes]


def render_difference(first: PlanReport, second: PlanReport, *, verbose: bool = False) -> RenderableType:
    """The ops that two policies run in different precisions on one model, and what each costs."""
    theirs = {site.site: site for site in second.sites}
    common = [(s, theirs[s.site]) for s in first.sites if s.site in theirs]
    different = [(a, b) for a, b in common if a.precision != b.precision and a.role not in _QUIET_ROLES]
    compared = sum(a.role not in _QUIET_ROLES for a, _ in common)
    parts: list[RenderableType] = [
        Text.assemble(
            ("diff  ", "bold"),
            f"{plain(first.model)}: {first.policy} and {second.policy} in {first.dtype} run "
            f"{len(different)} of {compared} sites differently",
        )
    ]
    if different:
        parts += [Text(), _difference_table(first, second, different, verbose)]
    only = [len(first.sites) - len(common), len(second.sites) - len(common)]
    if any(only):
        parts += [
            Text(),
            Text(
                f"{only[0]} sites only under {first.policy}, {only[1]} only under {second.policy}: "
                "code that asks for the dtype, or ops that one of them splits"
            ),
        ]
    grid = Table.grid(padding=(0, 2))
    grid.add_row("", Text(first.policy, "bold"), Text(second.policy, "bold"))
    for (label, ours), (_, other) in zip(totals(first)[:3], totals(second)[:3], strict=True):
        grid.add_row(Text(label, style="bold"), Text(ours), Text(other))
    return Group(*parts, Text(), grid)


def _difference_table(
    first: PlanReport,
    second: PlanReport,
    different: Sequence[tuple[PlannedSite, PlannedSite]],
    verbose: bool,
) -> Table:
    columns = ("site", "times", first.policy, second.policy)
    made = open_table(*columns, width=24, left=columns[2:])
    groups: dict[tuple[str, ...], list[str]] = {}
    for a, b in different:
        name = a.site if verbose else pattern_of(a.site)
        groups.setdefault((name, _side(a), _side(b), short_op(a.op)), []).append(a.site)
    for (name, ours, theirs, _), members in groups.items():
        made.add_row(
            Text(plain(name if len(members) > 1 else members[0]), overflow="fold"),
            str(len(members)) if len(members) > 1 else "",
            Text(ours),
            Text(theirs),
        )
    return made


def _side(site: PlannedSite) -> str:
    return f"{site.precision} {plain(site.rule or '(default)')}"
