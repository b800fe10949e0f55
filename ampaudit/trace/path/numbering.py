"""Gives the ops of another path the ids that earlier paths have at the same line."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ampaudit.core.sites import SiteId, SiteNumbering, SourceLine
from ampaudit.trace.graph import Site, TracedModel
from ampaudit.trace.stack import running_lines

__all__ = ["PathNumbering", "with_known_casts"]


class PathNumbering(SiteNumbering):
    """Assigns to the ops of a path the ids that earlier paths have at the same source line.

    Args:
        known: Sites of earlier paths.
    """

    def __init__(self, earlier: Sequence[Site]) -> None:
        super().__init__(site.id for site in earlier)
        self._known = _ids_by_place(earlier)

    def next_id(self, layer: str, op: str) -> SiteId:
        """Return the id that an earlier path has at this line, or a new one."""
        if not self._known:
            return super().next_id(layer, op)
        earlier_ids = self._known[(f"{layer or '(top)'}/{op}", *map(_position, running_lines()), None)]
        return earlier_ids.popleft() if earlier_ids else super().next_id(layer, op)


def with_known_casts(traced: TracedModel, earlier: Sequence[Site]) -> TracedModel:
    """Assign to casts, whose ids are made after the trace, the ids that they have on earlier paths."""
    ids, ops = _ids_by_place(earlier), [site for site in traced.sites if site.facts is not None]
    numbering = SiteNumbering(site.id for site in (*earlier, *ops))
    sites = []
    for site in traced.sites:
        if site.facts is None:
            same, (around, _, name) = ids[_place(site)], site.id.rpartition("/")
            site_id = same.popleft() if same else numbering.next_id(around, name.partition("#")[0])
            site = replace(site, id=site_id)
        sites.append(site)
    return replace(traced, sites=tuple(sites))


def _ids_by_place(sites: Sequence[Site]) -> defaultdict[tuple[Any, ...], deque[SiteId]]:
    ids: defaultdict[tuple[Any, ...], deque[SiteId]] = defaultdict(deque)
    for site in sites:
        ids[_place(site)].append(site.id)
    return ids


def _place(site: Site) -> tuple[Any, ...]:
    around, _, name = site.id.rpartition("/")  # a layer, or the call of an op whose twin it is part of
    return f"{around}/{name.partition('#')[0]}", _position(site.source), _position(site.caller), site.weight


def _position(line: SourceLine | None) -> tuple[str, int] | None:
    return None if line is None else (line.file, line.line)
