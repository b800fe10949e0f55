"""A difference for people: in a terminal, and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ampaudit.core.text import escape_control
from ampaudit.render.grid import hanging, labelled
from ampaudit.render.markdown import code, escaped, table
from ampaudit.report.difference import Difference, Differences, SiteChange

__all__ = ["difference_markdown", "render_differences"]

_LAYERS, _SITES, _ROWS = 20, 4, 50
_TITLES = {"worse": "Worse", "better": "Better", "other": "Different"}
_STYLES = {"worse": "bold red", "better": "bold green", "other": "bold"}


def render_differences(found: Differences, *, verbose: bool = False) -> RenderableType:
    """Per policy: the verdicts, what got worse, better or different, layer by layer."""
    parts: list[RenderableType] = []
    for pair in found.pairs:
        parts += [*([Text()] if parts else []), *_pair(pair, found, verbose)]
    return Group(*parts)


def _pair(pair: Difference, found: Differences, verbose: bool) -> Iterable[RenderableType]:
    yield Text.assemble(
        (escape_control(pair.new.source), "bold"),
        f": policy {escape_control(pair.new.policy)}, {pair.new.dtype}",
    )
    yield Text()
    worse, better = len(pair.of("worse")), len(pair.of("better"))
    style = "bold red" if worse else "bold green"
    verdicts = f"{pair.old.verdict.upper()} before, {pair.new.verdict.upper()} now"
    yield Text.assemble((f"{worse} worse, {better} better", style), f"  {verdicts}")
    for way in ("worse", "better", "other"):
        changes = pair.of(way)
        if changes and (way != "other" or verbose):
            yield Text()
            yield Text(_TITLES[way], _STYLES[way])
            yield from _by_layer(changes, verbose)
    yield Text()
    yield labelled(_summary(pair, found, verbose))


def _by_layer(changes: Sequence[SiteChange], verbose: bool) -> Iterable[RenderableType]:
    layers = _layers(changes)
    shown = list(layers.items()) if verbose else list(layers.items())[:_LAYERS]
    for layer, own in shown:
        some = own if verbose else own[:_SITES]
        rows = hanging((Text(_short(change), "cyan"), Text(escape_control(change.what))) for change in some)
        lines: list[RenderableType] = [Text(escape_control(layer or "(whole model)"), "bold")]
        lines.append(Padding(rows, (0, 0, 0, 2), expand=False))
        if len(own) > len(some):
            lines.append(Text(f"  and {len(own) - len(some)} more", "dim"))
        yield Padding(Group(*lines), (0, 0, 0, 2), expand=False)
    if len(layers) > len(shown):
        yield Text(f"  and {len(layers) - len(shown)} more layers; -v lists all", "dim")


def _layers(changes: Sequence[SiteChange]) -> dict[str, list[SiteChange]]:
    """The layers with the least of what is left first, new findings before all."""
    found: defaultdict[str, list[SiteChange]] = defaultdict(list)
    for change in changes:
        found[change.layer].append(change)
    return dict(sorted(found.items(), key=lambda item: min(map(_urgency, item[1]))))


def _urgency(change: SiteChange) -> tuple[bool, float]:
    return change.after is not None, change.after if change.after is not None else 0.0


def _short(change: SiteChange) -> str:
    """The op within its layer."""
    return escape_control(change.site.removeprefix(f"{change.layer}/") if change.layer else change.site)


def _summary(pair: Difference, found: Differences, verbose: bool) -> Iterable[tuple[str, str]]:
    less = f"(headroom within {found.bits:g} bits, accuracy within {found.decibels:g} dB)"
    yield "As before", f"{pair.same} sites {less}"
    for label, names in (("Added", pair.added), ("Removed", pair.removed)):
        if names:
            shown = ", ".join(escape_control(name) for name in names[:_SITES])
            yield label, f"{len(names)} sites: {shown}{' ...' if len(names) > _SITES else ''}"
    others = pair.of("other")
    if others and not verbose:
        yield "Different", f"{len(others)} changes that are neither; -v shows them"
    for note in pair.notes:
        yield "Note", note


def difference_markdown(found: Differences) -> str:
    """A table per policy, what got worse first."""
    parts: list[str] = []
    for pair in found.pairs:
        worse, better = pair.of("worse"), pair.of("better")
        mark = "❌" if worse else "✅"
        parts += [f"## {mark} {code(pair.new.source)}: {len(worse)} worse, {len(better)} better", ""]
        verdicts = f"{pair.old.verdict} before, {pair.new.verdict} now"
        parts += [f"{escaped(pair.new.policy)}, {escaped(pair.new.dtype)}: {verdicts}", ""]
        rows = [(_TITLES[c.way], code(c.site), escaped(c.what)) for c in (*worse, *better)]
        if rows:
            parts += [*table(("", "site", "what"), rows[:_ROWS]), ""]
        if len(rows) > _ROWS:
            parts += [f"and {len(rows) - _ROWS} more", ""]
        parts += [f"- {escaped(f'{label}: {text}')}" for label, text in _summary(pair, found, verbose=True)]
        parts.append("")
    return "\n".join(parts)
