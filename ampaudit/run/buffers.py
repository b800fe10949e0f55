"""Finds buffers whose updates round away in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ampaudit.core.sites import SiteId
from ampaudit.run.lockstep import LockStep
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["BufferUpdate", "buffer_updates"]


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """The update of a 16-bit buffer by one forward pass.

    Attributes:
        name: the buffer's path.
        site: the op that writes it.
        moved: elements that FP32 changes.
        stalled: those among them that are as before in 16 bits.
        counts: whether what is there before and after is whole numbers.
        example: value of the first that stalls.
    """

    name: str
    site: SiteId
    moved: int
    stalled: int
    counts: bool
    example: float


def buffer_updates(executor: LockStep) -> list[BufferUpdate]:
    """Return the updates of the last run that stalled."""
    found: list[BufferUpdate] = []
    places = {place.node: place for place in executor.program.traced.placeholders}
    for node, (reference, value) in executor.buffers.items():
        place, site = places[node.name], _writer(executor, node)
        if place.dtype not in LOW_PRECISION_DTYPES or site is None:
            continue
        before = executor.converted.masters[node.name].detach().to(reference.device)
        stalled = (reference != before) & (value == executor.backend.represent(before, place.dtype))
        count = int(stalled.sum())
        if count:
            moved = int((reference != before).sum())
            whole = bool((before == before.round()).all() & (reference == reference.round()).all())
            example = float(value[stalled][0])
            found.append(BufferUpdate(place.name, site, moved, count, whole, example))
    return found


_ARITHMETIC = frozenset(
    """
    add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ copy_ batch_norm instance_norm _native_batch_norm_legit
    """.split()
)


def _writer(executor: LockStep, buffer: fx.Node) -> SiteId | None:
    """Return the last op that computes what it writes to a buffer, or to a view of it."""
    shown, writer = {buffer}, None
    for step in executor.program.steps:
        written = [step.node.args[p] for p in step.mutates if p < len(step.node.args)]
        if step.site is not None and any(node in shown for node in written):
            shown.add(step.node)
            op = overload_of(step.target)
            writer = step.site.id if op is not None and base_name(op) in _ARITHMETIC else None
        elif not step.makes_values and shown.intersection(step.node.all_input_nodes):
            shown.add(step.node)
    return writer
