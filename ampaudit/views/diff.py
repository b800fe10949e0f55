"""Renders a difference of two reports: changes for the worse, the better or neither, by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ampaudit.core.text import plural
from ampaudit.render.blocks import Block, Indented, Labelled, Section, facts, line, tabulate
from ampaudit.render.view import Row, View
from ampaudit.report.difference import Difference, Differences, Direction, SiteChange

_LAYERS, _SITES, _ROWS = 20, 4, 50
_TITLES: dict[Direction, str] = {"worse": "Worse", "better": "Better", "other": "Different"}
_STYLES = {"worse": "bold red", "better": "bold green", "other": "bold"}


class DiffView(View[Differences]):
    """A row per change."""

    columns = ("policy", "dtype", "direction", "layer", "site", "what", "before", "after")

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render for each policy the verdicts, then what got worse, better or different, by layer."""
        verbose = verbosity > 0
        for pair in self.document.pairs:
            new, worse, better = pair.new, len(pair.of("worse")), len(pair.of("better"))
            yield Section((line((new.source, "bold"), f": policy {new.policy}, {new.dtype}"),))
            counts = (f"{worse} worse, {better} better", "bold red" if worse else "bold green")
            verdicts = f"{pair.old.verdict.upper()} before, {new.verdict.upper()} now"
            yield Section((line(counts, f"  {verdicts}"),))
            if verbosity < 0:
                continue
            for way, title in _TITLES.items():
                changes = pair.of(way)
                if changes and (way != "other" or verbose):
                    yield Section(tuple(_by_layer(changes, verbose)), title, _STYLES[way])
            yield Section((facts(self._summary(pair, verbose)),))

    def _summary(self, pair: Difference, verbose: bool) -> Iterator[tuple[str, str]]:
        differences = self.document
        less = f"(headroom within {differences.bits:g} bits, accuracy within {differences.decibels:g} dB)"
        yield "As before", f"{plural(pair.same, 'site')} {less}"
        for label, names in (("Added", pair.added), ("Removed", pair.removed)):
            if names:
                first = ", ".join(names[:_SITES])
                yield label, f"{plural(len(names), 'site')}: {first}{' ...' if len(names) > _SITES else ''}"
        others = pair.of("other")
        if others and not verbose:
            yield "Different", f"{plural(len(others), 'change')}, neither better nor worse; -v shows them"
        for note in pair.notes:
            yield "Note", note

    def digest(self) -> Iterator[Section]:
        """Render a table per policy, with changes for the worse first."""
        for pair in self.document.pairs:
            worse, better = pair.of("worse"), pair.of("better")
            counts = f": {len(worse)} worse, {len(better)} better"
            title = line("❌ " if worse else "✅ ", (pair.new.source, "code"), counts)
            policy = f"{pair.new.policy}, {pair.new.dtype}"
            blocks: list[Block] = [line(f"{policy}: {pair.old.verdict} before, {pair.new.verdict} now")]
            changes = (*worse, *better)
            rows = [(_TITLES[c.way], line((c.site, "code")), c.what) for c in changes[:_ROWS]]
            if rows:
                blocks.append(tabulate(("", "site", "what"), rows, left=("site", "what")))
            if len(changes) > _ROWS:
                blocks.append(line(f"and {len(changes) - _ROWS} more"))
            summary = facts(("", f"{label}: {text}") for label, text in self._summary(pair, verbose=True))
            yield Section((*blocks, summary), title, level=2)

    def rows(self) -> Iterator[Row]:
        """Return a row per change."""
        for pair in self.document.pairs:
            for change in pair.changes:
                place = (pair.new.policy, pair.new.dtype, change.way, change.layer, change.site)
                cells = (*place, change.what, change.before, change.after)
                yield dict(zip(self.columns, cells, strict=True))


def _by_layer(changes: Sequence[SiteChange], verbose: bool) -> Iterator[Block]:
    """List changes by layer: layers with new findings, then those with the least headroom or accuracy."""
    by_layer: defaultdict[str, list[SiteChange]] = defaultdict(list)
    for change in changes:
        by_layer[change.layer].append(change)
    layers = sorted(by_layer.items(), key=lambda item: min(map(_urgency, item[1])))
    first_layers = layers if verbose else layers[:_LAYERS]
    for layer, layer_changes in first_layers:
        some = layer_changes if verbose else layer_changes[:_SITES]
        rows = Labelled(tuple((line(_short(c), style="cyan"), (line(c.what),)) for c in some))
        name = line(layer or "(whole model)", style="bold")
        blocks: list[Block] = [name, Indented((rows,), 2)]
        if len(layer_changes) > len(some):
            blocks.append(line(f"  and {len(layer_changes) - len(some)} more", style="dim"))
        yield Indented(tuple(blocks), 2)
    if len(layers) > len(first_layers):
        yield line(f"  and {len(layers) - len(first_layers)} more layers; -v lists all", style="dim")


def _urgency(change: SiteChange) -> tuple[bool, float]:
    return change.after is not None, change.after if change.after is not None else 0.0


def _short(change: SiteChange) -> str:
    """Return the op within its layer."""
    return change.site.removeprefix(f"{change.layer}/") if change.layer else change.site
