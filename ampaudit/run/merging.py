"""Merges the measurements of one batch into a record."""

from __future__ import annotations

from collections.abc import Sequence

from ampaudit.core.sites import SiteId
from ampaudit.run.decisions import DecisionStats
from ampaudit.run.meter import MeasuredValue, Meter
from ampaudit.run.propagation import FaultPropagation
from ampaudit.run.record import RunRecord

__all__ = ["merge_measured", "note_origins"]


def note_origins(record: RunRecord, origins: Sequence[SiteId], faults: FaultPropagation, number: int) -> None:
    """Add the origins of a batch, with what each of them poisons."""
    harming = {origin.site for origin in record.origins if origin.harms}
    record.add_origins(faults.origin(site, number, origins) for site in origins if site not in harming)


def merge_measured(record: RunRecord, meter: Meter, measured: Sequence[MeasuredValue], number: int) -> None:
    """Add what a meter has seen in a batch."""
    for row in measured:
        record.observation(row.site).merge(row.fields, row.elements, number)
    for site, error, signal, elements in meter.local_results():
        observation = record.observation(site)
        observation.local_err_sq += error
        observation.local_ref_sq += signal
        observation.local_elements += elements
    for site, peak in meter.inside_results():
        observation = record.observation(site)
        observation.inside_peak = max(observation.inside_peak, peak)
    for site, elements, differing in meter.choices():
        record.decisions.setdefault(site, DecisionStats()).add(elements, differing)
    for stack, numbers in meter.chosen():
        record.chosen.setdefault(stack, set()).update(numbers)
    for name, statistics in meter.samples.results.items():
        record.observation(SiteId(name)).samples.add(statistics)
    record.gaps |= meter.gaps
    record.batches += 1
