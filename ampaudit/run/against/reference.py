"""Runs a reference model beside an audited one, and compares the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ampaudit.core.errors import InputError
from ampaudit.run.against.difference import ModelDifference, model_differences
from ampaudit.run.against.graph import ComparedGraph
from ampaudit.run.against.matching import Matching
from ampaudit.run.against.values import Values
from ampaudit.run.against.weights import MatchedWeight, match_weights
from ampaudit.run.backends import Float32Backend
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer
from ampaudit.trace.graph import Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["ModelComparison", "compare_executors"]

_ROUNDED_CONSTANTS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
_EXACT = 2e-4


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """How an audited graph corresponds to a reference.

    Attributes:
        matched: pairs of sites, the audited one first.
        only_reference: sites of the reference without a partner.
        only_audited: sites of the audited graph without a partner.
        differences: what differs, first what makes outputs wrong.
        outputs: the reference's outputs, by the audited graph's names.
    """

    matched: tuple[tuple[Site, Site], ...]
    only_reference: tuple[Site, ...]
    only_audited: tuple[Site, ...]
    differences: tuple[ModelDifference, ...]
    outputs: Mapping[str, torch.Tensor]


@torch.no_grad()
def compare_executors(
    reference: LockStep,
    audited: LockStep,
    given: list[torch.Tensor],
    own: list[torch.Tensor],
    inputs: Sequence[tuple[int, int]],
    seed: int,
) -> ModelComparison:
    """Compare an audited graph, widened to float32, with a reference.

    Args:
        reference: runs the reference.
        audited: runs the audited graph.
        given: the reference's inputs.
        own: the same for the audited graph.
        inputs: pairs of positions of inputs that correspond, the audited one first.
        seed: of random numbers in both.
    """
    torch.manual_seed(seed)
    outputs = [pair[0] for pair in reference.run(given, Observer())]
    named = _named_outputs(reference, audited, outputs)
    second = _recorded(_in_float32(audited), own, seed)
    plain = ComparedGraph(reference, given, Values(reference, given))
    weights = match_weights(plain, second)
    first = _recorded(_with_rounded_weights(reference, second, weights), given, seed)
    dtype = _low_precision_dtype(audited)
    tolerance = _ROUNDED_CONSTANTS.get(dtype, _EXACT) if dtype is not None else _EXACT
    pairs = {second.inputs[here]: first.inputs[there] for here, there in inputs}
    found = Matching(first, second, pairs, weights, tolerance)
    counterpart = dict(zip(named, _output_nodes(reference, named, outputs), strict=True))
    wrong = {
        name: node
        for name, node in second.outputs.items()
        if name in counterpart and not found.same_value(counterpart[name], node)
    }
    return ModelComparison(
        tuple((op.site, other.site) for op, other in found.partner.items()),
        tuple(op.site for op in found.only_reference),
        tuple(op.site for op in found.only_audited),
        tuple(model_differences(found, weights, dtype or torch.float32, wrong)),
        named,
    )


def _recorded(executor: LockStep, inputs: list[torch.Tensor], seed: int) -> ComparedGraph:
    values = Values(executor, inputs)
    torch.manual_seed(seed)
    executor.run(inputs, values)
    return ComparedGraph(executor, inputs, values)


def _in_float32(executor: LockStep) -> LockStep:
    return LockStep(executor.program, executor.placed, Float32Backend(), executor.device, reference_only=True)


def _with_rounded_weights(
    executor: LockStep, audited: ComparedGraph, weights: Mapping[fx.Node, MatchedWeight]
) -> LockStep:
    """Return an executor of the reference with the weights that the audited graph stores in 16 bits."""
    masters = dict(executor.converted.masters)
    for node, match in weights.items():
        stored = audited.weights[node]
        if stored.dtype in LOW_PRECISION_DTYPES and not match.what:
            known = masters[match.other.name]
            same = stored.t() if match.transposed else stored
            masters[match.other.name] = same.reshape(known.shape).to(known.dtype)
    placed = replace(executor.converted, masters=masters)
    return LockStep(executor.program, placed, Float32Backend(), executor.device, reference_only=True)


def _named_outputs(
    reference: LockStep, audited: LockStep, outputs: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the reference's outputs by the names of the audited graph; without those names, in order."""
    here, there = audited.program.traced.outputs, reference.program.traced.outputs
    known = dict(zip(there, outputs, strict=True))
    if set(here) <= set(there):
        return {name: known[name] for name in here}
    if len(here) != len(there):
        raise InputError(
            f"the audited model has {len(here)} outputs, and the reference {len(there)}",
            hint="compare models with the same outputs",
        )
    return dict(zip(here, outputs, strict=True))


def _output_nodes(
    reference: LockStep, named: Mapping[str, torch.Tensor], outputs: list[torch.Tensor]
) -> list[fx.Node]:
    nodes = reference.program.outputs
    places = [next(i for i, output in enumerate(outputs) if output is value) for value in named.values()]
    return [nodes[place] for place in places]


def _low_precision_dtype(executor: LockStep) -> torch.dtype | None:
    """Return the 16-bit dtype of a graph; ``None`` if it has none."""
    dtypes = {place.dtype for place in executor.program.traced.placeholders}
    dtypes |= {site.dtype for site in executor.program.traced.sites}
    return next((dtype for dtype in LOW_PRECISION_DTYPES if dtype in dtypes), None)
