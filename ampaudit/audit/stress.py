"""``scan --stress N``: searches the input range for inputs that overflow an unproved site."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ampaudit.audit.checks import CheckContext
from ampaudit.audit.config import ScanConfig
from ampaudit.bounds import BoundTable
from ampaudit.core.config import silent
from ampaudit.core.errors import AuditError
from ampaudit.report.extrapolation import Stressed
from ampaudit.run.audit import Audit, RunConfig, run_audits
from ampaudit.run.search import Search
from ampaudit.source import Batch, ModelSource
from ampaudit.source.inputs import save_inputs, with_tensors
from ampaudit.trace import Role, Site
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.path.recorder import refuse_path

__all__ = ["stressed"]

SITES = 5


def stressed(
    source: ModelSource,
    audit: Audit,
    plan: RunConfig,
    context: CheckContext,
    settings: ScanConfig,
) -> tuple[Stressed, ...]:
    """Return one result per searched site, nearest the limit first; overflowing inputs are saved."""
    refuse_path(audit.converted.traced, "--stress")
    table = context.bounds
    assert table is not None
    search = Search(audit.converted, _ranges(table, audit), plan.device)
    batch = source.batches[0]
    start = tensor_leaves(batch.args, batch.kwargs)
    results: list[Stressed] = []
    targets = list(_targets(context, table))
    for number, site in enumerate(targets):
        settings.on_progress(f"stressing {site.id}", number, len(targets))
        best = search.ascend(site.id, start, settings.stress, settings.seed + number)
        observed_peak = context.observed(site.id).ref_peak
        over = best.peak >= context.number_format.overflow_at
        broken = over and _breaks(source, plan, with_tensors(batch, best.tensors), site)
        saved = None
        if broken:
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", site.id)
            path = Path(settings.stress_dir) / f"overflow-{name}.safetensors"
            save_inputs(best.tensors, path)
            saved = str(path)
        results.append(Stressed(site.id, observed_peak, max(best.peak, observed_peak), broken, saved))
    return tuple(results)


def _ranges(table: BoundTable, audit: Audit) -> dict[str, tuple[float, float]]:
    by_name = {assumed.name: (assumed.low, assumed.high) for assumed in table.assumed}
    return {p.node: by_name[p.name] for p in audit.converted.traced.placeholders if p.name in by_name}


def _targets(context: CheckContext, table: BoundTable) -> Sequence[Site]:
    """Return 16-bit sites that are neither proved nor broken, nearest the limit first."""
    candidates = [
        site
        for site in context.low_precision_sites
        if site.role in (Role.COMPUTE, Role.CAST, Role.INSERTED_CAST)
        and site.id not in table.proved
        and site.id not in context.broken_sites
        and site.id not in context.parameter_free
        and context.observed(site.id).elements
    ]
    return sorted(candidates, key=lambda site: -context.observed(site.id).ref_peak)[:SITES]


def _breaks(source: ModelSource, plan: RunConfig, batch: Batch, site: Site) -> bool:
    """Return whether a run on an input gives inf or NaN at a site."""
    try:
        (audit,) = run_audits(source.model, [batch], [replace(plan, measured={})], silent)
    except AuditError:
        return False
    stats = audit.record.observations.get(site.id)
    return stats is not None and stats.bad > 0
