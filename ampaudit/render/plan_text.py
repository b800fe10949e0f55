"""A plan, and two plans side by side, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampaudit.core.sites import pattern_of
from ampaudit.core.text import escape_control, format_bytes, short_op
from ampaudit.render.grid import labelled, open_table
from ampaudit.report.plan import PlannedSite, PlanReport

__all__ = ["matching_sites", "render_difference", "render_plan"]

_QUIET_ROLES = ("view", "select")
Item = TypeVar("Item")


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
            f"{escape_control(plan.model)}: policy {plan.policy}, "
            f"{plan.dtype}; nothing was run in {plan.dtype}",
        ),
        Text(),
        _site_table(shown, verbose),
    ]
    if len(shown) < len(sites):
        hidden = len(sites) - len(shown)
        parts.append(Text(f"and {hidden} sites that only hand on values; -v shows them", "dim"))
    if layer is not None:
        parts += [Text(), Text("below, the rules of these layers and the totals of the whole model", "dim")]
    return Group(*parts, Text(), _rule_table(plan, sites), Text(), labelled(totals(plan)))


def _site_table(sites: Sequence[PlannedSite], verbose: bool) -> Table:
    made = open_table(
        "site", "times", "precision", "casts", "bytes", "rule", width=24, left=("precision", "rule")
    )
    rows = _stacked(sites, lambda s: s.site, lambda s: (s.precision, s.rule or "", s.op), verbose)
    for name, times, members in rows:
        site = members[0]
        made.add_row(
            name,
            times,
            Text(site.precision, "bold" if site.precision != "float32" else ""),
            str(sum(s.casts for s in members) or ""),
            format_bytes(sum(s.cast_bytes for s in members)) if any(s.casts for s in members) else "",
            Text(escape_control(site.rule or "(default)"), overflow="fold"),
        )
    return made


def _stacked(
    items: Iterable[Item],
    site: Callable[[Item], str],
    alike: Callable[[Item], tuple[str, ...]],
    verbose: bool,
) -> Iterable[tuple[Text, str, list[Item]]]:
    """Items of the same place in different layers of a stack together, with their name and number."""
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        place = site(item) if verbose else pattern_of(site(item))
        groups.setdefault((place, *alike(item)), []).append(item)
    for (place, *_), members in groups.items():
        name = place if len(members) > 1 else site(members[0])
        yield (
            Text(escape_control(name), overflow="fold"),
            str(len(members)) if len(members) > 1 else "",
            members,
        )


def _rule_table(plan: PlanReport, sites: Sequence[PlannedSite]) -> Table:
    counts = Counter(site.rule for site in sites)
    made = open_table("rule", "sites", "reason", "why", left=("reason", "why"))
    for use in plan.rules:
        if counts[use.rule]:
            name = Text(escape_control(use.rule or "(default)"), overflow="fold")
            made.add_row(name, str(counts[use.rule]), use.reason, Text(escape_control(use.why)))
    return made


def totals(plan: PlanReport) -> list[tuple[str, str]]:
    """Precision, casts and weights in words."""
    weights = plan.weights
    masters = f"; training keeps {format_bytes(weights.masters)} of FP32 masters beside them"
    other = f", {plan.other} in another dtype" if plan.other else ""
    rows = [
        ("Precision", f"{plan.lower} computing sites in {plan.dtype}, {plan.float32} in float32{other}"),
        (
            "Casts",
            f"{plan.casts} inserted, moving {format_bytes(plan.cast_bytes)} per forward pass of this batch; "
            f"{plan.author_casts} of the author's own",
        ),
        (
            "Weights",
            f"{format_bytes(weights.before)} before, {format_bytes(weights.after)} after conversion"
            f"{masters if weights.masters else ''}",
        ),
    ]
    return rows + [("Note", escape_control(note)) for note in plan.notes]


def render_difference(first: PlanReport, second: PlanReport, *, verbose: bool = False) -> RenderableType:
    """The ops that two policies run in different precisions on one model, and what each costs."""
    theirs = {site.site: site for site in second.sites}
    common = [(s, theirs[s.site]) for s in first.sites if s.site in theirs]
    different = [(a, b) for a, b in common if a.precision != b.precision and a.role not in _QUIET_ROLES]
    compared = sum(a.role not in _QUIET_ROLES for a, _ in common)
    parts: list[RenderableType] = [
        Text.assemble(
            ("diff  ", "bold"),
            f"{escape_control(first.model)}: {first.policy} and {second.policy} in {first.dtype} run "
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
    sides = zip(totals(first)[:3], totals(second)[:3], strict=True)
    heads = ("", Text(first.policy, "bold"), Text(second.policy, "bold"))
    costs = ((label, ours, other) for (label, ours), (_, other) in sides)
    return Group(*parts, Text(), labelled([heads, *costs]))


def _difference_table(
    first: PlanReport,
    second: PlanReport,
    different: Sequence[tuple[PlannedSite, PlannedSite]],
    verbose: bool,
) -> Table:
    columns = ("site", "times", first.policy, second.policy)
    made = open_table(*columns, width=24, left=columns[2:])
    rows = _stacked(
        different, lambda pair: pair[0].site, lambda pair: (*map(_side, pair), short_op(pair[0].op)), verbose
    )
    for name, times, members in rows:
        made.add_row(name, times, *(Text(_side(site)) for site in members[0]))
    return made


def _side(site: PlannedSite) -> str:
    return f"{site.precision} {escape_control(site.rule or '(default)')}"
