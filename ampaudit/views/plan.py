"""Renders a plan: one row per op, the rules and the totals; or two plans side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ampaudit.core.sites import pattern_of
from ampaudit.core.text import format_bytes, plural, short_op
from ampaudit.render.blocks import Block, Line, Section, Table, facts, line, tabulate
from ampaudit.render.view import Row, View
from ampaudit.report.plan import PlannedMemory, PlannedSite, PlanReport

_QUIET_ROLES = ("view", "select")
_DEFAULT = "(default)"
Item = TypeVar("Item")


class PlanView(View[PlanReport]):
    """A row per op."""

    about = "model"

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render a row per op (merged over stacked layers), the rules and the totals."""
        plan, verbose = self.document, verbosity > 0
        how = f"policy {plan.policy}, {plan.dtype}; nothing was run in {plan.dtype}"
        yield Section((line(("plan  ", "bold"), f"{self.name}: {how}"),))
        if verbosity < 0:
            return
        sites = plan.sites
        visible = [s for s in sites if verbose or s.role not in _QUIET_ROLES or s.casts]
        blocks: list[Block] = [_site_table(visible, verbose)]
        if len(visible) < len(sites):
            hidden = len(sites) - len(visible)
            blocks.append(line(f"and {plural(hidden, 'site')} without arithmetic; -v shows all", style="dim"))
        yield Section(tuple(blocks))
        counts = Counter(site.rule for site in sites)
        used = [use for use in plan.rules if counts[use.rule]]
        rules = [(use.rule or _DEFAULT, str(counts[use.rule]), use.reason, use.why) for use in used]
        yield Section((tabulate(("rule", "sites", "reason", "why"), rules, left=("reason", "why")),))
        if plan.memory is not None:
            segments = [
                (str(number), s.first, *map(format_bytes, (s.weights, s.values, s.boundary)))
                for number, s in enumerate(plan.memory.segments, 1)
            ]
            heads = ("segment", "first op", "weights", "values", "boundary")
            yield Section((tabulate(heads, segments, left=("first op",), width=24),))
        yield Section((facts(_totals(plan)),))

    def rows(self) -> Iterator[Row]:
        """Return a row per op."""
        plan = self.document
        names = ("site", "layer", "op", "role", "precision", "rule", "reason", "casts", "cast_bytes")
        run = {"policy": plan.policy, "dtype": plan.dtype}
        for site in plan.sites:
            yield {**run, **{name: getattr(site, name) for name in names}}


def _site_table(sites: Sequence[PlannedSite], verbose: bool) -> Table:
    rows: list[tuple[str | Line, ...]] = []
    groups = stacked(sites, lambda s: s.site, lambda s: (s.precision, s.rule or "", s.op), verbose)
    for name, times, members in groups:
        site = members[0]
        casts = sum(s.casts for s in members)
        rows.append(
            (
                name,
                times,
                line((site.precision, "bold" if site.precision != "float32" else "")),
                str(casts or ""),
                format_bytes(sum(s.cast_bytes for s in members)) if casts else "",
                site.rule or _DEFAULT,
            )
        )
    heads = ("site", "times", "precision", "casts", "bytes", "rule")
    return tabulate(heads, rows, left=("precision", "rule"), width=24)


def stacked(
    items: Iterable[Item],
    site: Callable[[Item], str],
    alike: Callable[[Item], tuple[str, ...]],
    verbose: bool,
) -> Iterator[tuple[str, str, list[Item]]]:
    """Group corresponding items of stacked layers; yield the name, the count if above one, and the items."""
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        place = site(item) if verbose else pattern_of(site(item))
        groups.setdefault((place, *alike(item)), []).append(item)
    for (place, *_), members in groups.items():
        several = len(members) > 1
        yield (
            place if several else site(members[0]),
            str(len(members)) if several else "",
            members,
        )


def _memory(memory: PlannedMemory) -> str:
    """Describe the memory that a scan by segment needs."""
    count = len(memory.segments)
    cut = f"{plural(count, 'segment')} within {format_bytes(memory.limit)}"
    needs = f"the largest needs {format_bytes(memory.largest)} for its weights and the values of one batch"
    waiting = f"; boundaries of {plural(memory.batches, 'batch')}: {format_bytes(memory.waiting)}"
    return f"{cut}; {needs}{waiting if count > 1 else ''}"


def _totals(plan: PlanReport) -> list[tuple[str, str]]:
    weights = plan.weights
    other = f", {plan.other} in another dtype" if plan.other else ""
    casts = f"{plan.casts} inserted, moving {format_bytes(plan.cast_bytes)} per forward pass of this batch"
    sizes = f"{format_bytes(weights.before)} before, {format_bytes(weights.after)} after conversion"
    masters = f"; training keeps {format_bytes(weights.masters)} of FP32 masters beside them"
    return [
        (
            "Precision",
            f"{plural(plan.lower, 'computing site')} in {plan.dtype}, {plan.float32} in float32{other}",
        ),
        ("Casts", f"{casts}; {plan.author_casts} in the model's code"),
        ("Weights", f"{sizes}{masters if weights.masters else ''}"),
        *((("Memory", _memory(plan.memory)),) if plan.memory is not None else ()),
        *(("Note", note) for note in plan.notes),
    ]


def plans_compared(first: PlanReport, second: PlanReport, *, verbose: bool = False) -> Iterator[Section]:
    """Render the ops that two policies run in different precisions, and the cost of each policy."""
    theirs = {site.site: site for site in second.sites}
    common = [(s, theirs[s.site]) for s in first.sites if s.site in theirs]
    compared = [(a, b) for a, b in common if a.role not in _QUIET_ROLES]
    different = [(a, b) for a, b in compared if a.precision != b.precision]
    policies = f"{first.model}: {first.policy} and {second.policy} in {first.dtype}"
    run = f"run {len(different)} of {len(compared)} sites differently"
    yield Section((line(("diff  ", "bold"), f"{policies} {run}"),))
    if different:
        sites = stacked(
            different,
            lambda pair: pair[0].site,
            lambda pair: (*map(_side, pair), short_op(pair[0].op)),
            verbose,
        )
        rows = ((name, times, *map(_side, members[0])) for name, times, members in sites)
        names = ("site", "times", first.policy, second.policy)
        yield Section((tabulate(names, rows, left=names[2:], width=24),))
    only = [len(first.sites) - len(common), len(second.sites) - len(common)]
    if any(only):
        sides = f"{only[0]} sites only under {first.policy}, {only[1]} only under {second.policy}"
        yield Section((line(f"{sides}: code that asks for the dtype, or ops that one of them splits"),))
    totals = zip(_totals(first)[:3], _totals(second)[:3], strict=True)
    heads = (line(""), line(first.policy, style="bold"), line(second.policy, style="bold"))
    yield Section((facts([heads, *((label, ours, other) for (label, ours), (_, other) in totals)]),))


def _side(site: PlannedSite) -> str:
    return f"{site.precision} {site.rule or _DEFAULT}"
