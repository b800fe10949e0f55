"""Runs a reference model beside an audited one, and compares the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from ampaudit.core.errors import InputError, ReferenceBroken
from ampaudit.run.against.comparison import ModelComparison
from ampaudit.run.against.difference import model_differences
from ampaudit.run.against.graph import ComparedGraph
from ampaudit.run.against.matching import Matching
from ampaudit.run.against.values import Values
from ampaudit.run.against.weights import MatchedWeight, match_weights
from ampaudit.run.backends import Float32Backend
from ampaudit.run.config import RunConfig
from ampaudit.run.executors import ExecutorCache
from ampaudit.run.fp32_check import is_broken
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer
from ampaudit.run.record import RunRecord
from ampaudit.source.interface import Batch
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["ReferenceModel", "compare_executors"]

_ROUNDED_CONSTANTS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
_EXACT = 2e-4


class ReferenceModel:
    """Runs a model in FP32 on the batches that another one is audited on.

    Args:
        model: the reference.
        batches: its inputs.
        config: of the audit.
        places: for each input of the audited model, in order, the place of the reference's.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], config: RunConfig, places: Sequence[int]
    ) -> None:
        plain = RunConfig(None, config.author_rules, config.number_format, config.device, config.seed)
        plain = replace(plain, release=config.release)
        self._executors = ExecutorCache(model, plain, RunRecord(device=config.device.type, backend=""))
        self._batches = batches
        self._places = places
        self._seed = config.seed

    def compare(self, executor: LockStep, own: list[torch.Tensor], number: int) -> ModelComparison:
        """Run the reference on the batch of that number, and compare the audited model with it.

        Raises:
            ReferenceBroken: the reference gives NaN or infinity.
            InputError: the models have different numbers of outputs.
        """
        batch = self._batches[number]
        reference = self._executors.get(batch, number)
        given = tensor_leaves(batch.args, batch.kwargs)
        found = compare_executors(reference, executor, given, own, self._places, self._seed + number)
        broken = next((name for name, output in found.outputs.items() if is_broken(output)), None)
        if broken is not None:
            where = batch.title(number)
            raise ReferenceBroken(f"the reference itself gives NaN or infinity in {where}: {broken}")
        return found


@torch.no_grad()
def compare_executors(
    reference: LockStep,
    audited: LockStep,
    given: list[torch.Tensor],
    own: list[torch.Tensor],
    places: Sequence[int],
    seed: int,
) -> ModelComparison:
    """Compare an audited graph, widened to float32, with a reference.

    Args:
        reference: runs the reference.
        audited: runs the audited graph.
        given: the reference's inputs.
        own: the same for the audited graph.
        places: for each input of the audited graph, in order, the place of the reference's.
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
    pairs = {node: first.inputs[place] for node, place in zip(second.inputs, places, strict=True)}
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
