"""Collects the measurements of a policy's measured rules: for each site, the peaks around its op."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.run.step import Step
from ampaudit.trace.converted import Release
from ampaudit.trace.graph import Slot
from ampaudit.trace.opnames import converts

__all__ = ["measurements", "weight_peaks"]


def measurements(
    program: Program, record: RunRecord, given: Mapping[str, float], weights: Mapping[str, float]
) -> dict[SiteId, Measurement]:
    """Return the FP32 peaks at every op that a rule decided about.

    Args:
        program: what was run.
        record: what was measured, over all batches.
        given: peaks of the batches' tensors, by placeholder.
        weights: peaks of parameters, buffers and constants, by name.
    """
    peaks = dict.fromkeys(program.inputs, None) | {
        n: given[n.name] for n in program.inputs if n.name in given
    }
    for step in program.steps:
        peaks[step.node] = _output_peak(step, record, peaks)
    masks = _mask_nodes(program, record)
    stored = _stored_nodes(program)
    found: dict[SiteId, Measurement] = {}
    for step in program.steps:
        if step.site is None or step.site.facts is None:
            continue
        facts, sources = step.site.facts, step.node.all_input_nodes
        found[step.site.id] = Measurement(
            weight_peak=max((weights[n] for n in facts.parameters if n in weights), default=None),
            input_peak=_largest(peaks[n] for n in sources if n not in stored),
            output_peak=peaks[step.node],
            consumer_peak=_largest(peaks[n] for n in _users(step.node) if n in peaks),
            mask=step.node in masks or any(n in masks for n in sources) or _is_attention_mask(step, peaks),
        )
    return found


def weight_peaks(program: Program, release: Release | None = None) -> dict[str, float]:
    """Return the largest finite magnitude of each stored float tensor, fetched in one transfer.

    ``release`` gives the memory of each back as soon as it was read.
    """
    places = [p for p in program.traced.placeholders if p.slot is not Slot.INPUT]
    tensors = {p.name: program.traced.tensors[p.node].detach() for p in places}
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not floats:
        return {}
    ends = []
    for tensor in floats.values():
        ends.append(torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float()))
        if release is not None:
            release(tensor)
    fetched = torch.stack([torch.maximum(-low, high).double().cpu() for low, high in ends]).tolist()
    return {
        name: peak if math.isfinite(peak) else float(floats[name].nan_to_num(0.0, 0.0, 0.0).abs().amax())
        for name, peak in zip(floats, fetched, strict=True)
    }


def _output_peak(step: Step, record: RunRecord, peaks: Mapping[fx.Node, float | None]) -> float | None:
    """Return the measured peak, or for a view that of its source."""
    seen = record.observations.get(step.site.id) if step.site else None
    if seen is not None:
        return seen.ref_peak
    return None if step.makes_values else _largest(peaks[n] for n in step.node.all_input_nodes)


def _stored_nodes(program: Program) -> set[fx.Node]:
    """Return parameters, buffers and constants, with their casts and views."""
    names = {p.node for p in program.traced.placeholders if p.slot is not Slot.INPUT}
    stored = {node for node in program.inputs if node.name in names}
    for step in program.steps:
        site = step.site
        handed_on = not step.makes_values or (site is not None and site.role.converts)
        if handed_on and step.node.all_input_nodes and all(n in stored for n in step.node.all_input_nodes):
            stored.add(step.node)
    return stored


def _mask_nodes(program: Program, record: RunRecord) -> set[fx.Node]:
    """Return nodes whose value is or contains a mask, including views of one."""
    by_design = record.masks | record.by_design
    masks: set[fx.Node] = set()
    for step in program.steps:
        handed_on = not step.makes_values and any(n in masks for n in step.node.all_input_nodes)
        if handed_on or (step.site is not None and step.site.id in by_design):
            masks.add(step.node)
    return masks


def _is_attention_mask(step: Step, peaks: Mapping[fx.Node, float | None]) -> bool:
    """Return whether a fused attention is called with an explicit mask."""
    if not str(step.target).startswith("aten.scaled_dot_product_attention"):
        return False
    args = step.node.args
    mask = step.node.kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    return isinstance(mask, fx.Node) and peaks.get(mask) is not None


def _users(node: fx.Node) -> Iterable[fx.Node]:
    """Return the users of a value, looking through casts and tuple access."""
    for user in node.users:
        if user.target is operator.getitem or converts(user.target):
            yield from _users(user)
        else:
            yield user


def _largest(peaks: Iterable[float | None]) -> float | None:
    return max((peak for peak in peaks if peak is not None), default=None)
