"""Probes the outputs of a run, batch by batch, and prepares further runs of the same batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError
from ampaudit.instruments.sensitivity import INSTRUMENT
from ampaudit.instruments.sensitivity.probe import (
    Collected,
    ErrorTape,
    PrecisionGraph,
    SensitivityPart,
    ValueKind,
    ValueNames,
    float_nodes,
    probe,
    values_of,
)
from ampaudit.run.backends import Emulated, Float32Backend
from ampaudit.run.config import Recorder, RunConfig
from ampaudit.run.device import guarded, refuse_more_than_memory
from ampaudit.run.lockstep import LockStep, Observer, Pair
from ampaudit.run.program import Program, Step
from ampaudit.run.record import RunRecord
from ampaudit.source.interface import Batch
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Placeholder
from ampaudit.trace.values import torch_dtype

SEPARATE = 16  # number of outputs up to which each is probed separately
MIN_PROBES, MAX_PROBES = 2, 32
SPREAD = 0.06  # relative standard error of the sum over all values that suffices: 0.25 dB
COPIES = 4  # of the bytes of values in 16 bits: FP32's values, and their errors in float32
ELEMENTS = 1 << 26  # elements of values that all probes of an output may process


@dataclass(frozen=True, slots=True)
class ProbedBatch:
    """A batch that can be run again with any choice of precisions."""

    number: int  # number of the batch
    executor: LockStep  # executor of the program traced for it
    names: ValueNames  # names of the program's values
    tensors: Sequence[torch.Tensor]  # inputs of the batch
    seed: int  # seed of its random numbers
    references: Mapping[str, torch.Tensor]  # FP32's outputs by name
    columns: tuple[str, ...]  # names of the probed outputs, or groups of outputs

    def run(self, wide: Collection[str], dtype: torch.dtype) -> dict[str, Pair]:
        """Run with these values in float32 and all others in 16 bits; return FP32's outputs and these."""
        mixed = MixedRun(self.executor, self.names, self.names.graph.in_float32(wide), dtype)
        with guarded(self.executor.device):
            torch.manual_seed(self.seed)
            outputs = mixed.run(list(self.tensors), Observer())
        pairs = zip(self.executor.program.traced.outputs, outputs, strict=True)
        return {name: (self.references[name], pair[1]) for name, pair in pairs}


class SensitivityProbe(Recorder):
    """Probes the outputs of a run.

    Args:
        config: Configuration of the run.
        batches: Batches of the run.
        decisions: Whether to probe the floats from which outputs are decided, if no output is a float.
    """

    def __init__(self, config: RunConfig, batches: Sequence[Batch], *, decisions: bool = False) -> None:
        self._decisions = decisions
        self.graph = PrecisionGraph()  # values of all programs
        self.batches: list[ProbedBatch] = []  # the probed batches
        self._record = SensitivityPart()
        self._inputs = batches
        self._dtype = torch_dtype(config.number_format)
        self._seed = config.seed
        self._device = config.device
        self._names: dict[int, ValueNames] = {}
        self._tape: ErrorTape | None = None

    def take(self, record: RunRecord) -> None:
        """Move the results since the last call into the record of a batch."""
        record.parts[INSTRUMENT.name], self._record = self._record, SensitivityPart()

    def skip(self, executor: LockStep) -> None:
        """Register the values of a batch that another machine runs."""
        self._names_of(executor)

    def keep_low(self, casts: Collection[str]) -> None:
        """Mark casts in the model's code as casts to 16 bits, whatever their input."""
        for graph in (self.graph, *(batch.names.graph for batch in self.batches)):
            graph.keep_low(casts)

    def following(self, observer: Observer, program: Program) -> Observer:
        """Wrap the observer in a tape, if it fits into memory."""
        refuse_more_than_memory(program.traced.graph, self._device, COPIES)
        self._tape = ErrorTape(observer, float_nodes(program))
        return self._tape

    def finish(
        self, executor: LockStep, outputs: list[Pair], unrepaired: list[Pair], number: int, title: str
    ) -> None:
        """Probe the outputs of the run followed last.

        Raises:
            InputError: No output has a gradient.
            RunFailed: An op has no gradient.
        """
        assert self._tape is not None, "a run is recorded before its probes"
        tape, self._tape = self._tape, None
        names = self._names_of(executor)
        batch, seed = self._inputs[number], self._seed + number
        tensors = tensor_leaves(batch.args, batch.kwargs)
        pairs = dict(zip(executor.program.traced.outputs, outputs, strict=True))
        floats = any(pair[0].is_floating_point() for pair in pairs.values())
        sources = _decision_sources(executor.program, tape) if self._decisions and not floats else {}
        columns = sources or _float_outputs(executor.program, pairs, title)
        references = {name: pair[0] for name, pair in pairs.items()}
        self.batches.append(ProbedBatch(number, executor, names, tensors, seed, references, tuple(columns)))
        generator = torch.Generator().manual_seed(seed)
        for name, group in columns.items():
            seeds = (
                {node: signs_like(r, generator) for node, r in group.items()} for _ in range(max_probes(tape))
            )
            collected = (
                probe(executor, names, tape, seed, self._dtype, decisions=bool(sources)) for seed in seeds
            )
            self._record.add(f"{name} of {title}", enough_probes(collected))

    def _names_of(self, executor: LockStep) -> ValueNames:
        """Return the names of a program's values, and add them to the graph."""
        if id(executor) not in self._names:
            self._names[id(executor)] = values_of(executor)
            self.graph.merge(self._names[id(executor)].graph)
        return self._names[id(executor)]


def max_probes(tape: ErrorTape) -> int:
    """Return the maximum number of probes: large models need few."""
    return min(max(ELEMENTS // tape.elements, MIN_PROBES), MAX_PROBES)


def enough_probes(probes: Iterator[Collected], least: int = MIN_PROBES) -> list[Collected]:
    """Return as many probes as their mean needs to converge: outputs of few elements need more."""
    collected, totals = list[Collected](), list[float]()
    for one in probes:
        collected.append(one)
        totals.append(sum(one.own.values()) + sum(one.backward.values()))
        if len(collected) >= least:
            spread = statistics.stdev(totals) / math.sqrt(len(totals))
            if spread <= SPREAD * statistics.fmean(totals):
                break
    return collected


def signs_like(
    reference: torch.Tensor, generator: torch.Generator, norm: torch.Tensor | None = None
) -> torch.Tensor:
    """Return random signs, scaled so that squared errors are relative to the squares of the output.

    ``norm`` is that of all outputs that are probed together, if there are several.
    """
    signs = torch.randint(0, 2, reference.shape, generator=generator).mul_(2).sub_(1)
    scale = torch.linalg.vector_norm(reference.detach().double()) if norm is None else norm
    scaled: torch.Tensor = signs.to(reference.device, reference.dtype) / scale.to(reference.dtype)
    return scaled


def _float_outputs(
    program: Program, pairs: Mapping[str, Pair], title: str
) -> dict[str, dict[fx.Node, torch.Tensor]]:
    """Return the floating-point outputs, grouped as they are probed, with FP32's values."""
    nodes = dict(zip(program.traced.outputs, program.outputs, strict=True))
    floats = {
        name: (nodes[name], pair[0])
        for name, pair in pairs.items()
        if pair[0].is_floating_point() and bool((pair[0] != 0).any())
    }
    if not floats:
        raise InputError(
            f"no output of {title} has a gradient: all are complex, integers, booleans, zeros or empty",
            hint="return floats such as logits, or give tune a metric: --metric-drop",
        )
    if len(floats) > SEPARATE:
        return {f"{len(floats)} outputs": dict(floats.values())}
    return {name: dict([item]) for name, item in floats.items()}


def _decision_sources(program: Program, tape: ErrorTape) -> dict[str, dict[fx.Node, torch.Tensor]]:
    """Return the last floating-point values before the outputs, from which they are decided."""
    values = tape.references
    sources: dict[fx.Node, torch.Tensor] = {}
    pending, visited = list(program.outputs), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        value = values.get(node)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and bool((value != 0).any()):
            sources[node] = value
        else:
            pending += node.all_input_nodes
    return {"what the outputs are decided from": sources} if sources else {}


class _MixedBackend(Emulated):
    """A backend whose 16-bit ops round operands that are in float32.

    ``wide`` are the names of the values in float32.
    """

    name = "mixed"

    def __init__(self, names: ValueNames, wide: Collection[str], dtype: torch.dtype) -> None:
        self._exact = Float32Backend()
        self._dtype = dtype
        self._reads = {
            node: frozenset(source for source in names.sources.get(node, ()) if names.of[source] in wide)
            for node in names.producers
            if names.of[node] not in wide
        }

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return super().arguments(step) if step.node in self._reads else self._exact.arguments(step)

    def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if step.node not in self._reads:
            return self._exact.call(step, args, kwargs)
        if exposed := self._reads[step.node]:
            template = pytree.tree_leaves(step.float32_arguments)
            values, structure = pytree.tree_flatten((args, kwargs))
            leaves = [
                self.represent(value, self._dtype)
                if node in exposed and isinstance(value, torch.Tensor)
                else value
                for node, value in zip(template, values, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(leaves, structure)
        return super().call(step, args, kwargs)


class MixedRun(LockStep):
    """The 16-bit half of a lock-step run, with some values in float32; arguments as for ``_MixedBackend``."""

    def __init__(self, whole: LockStep, names: ValueNames, wide: Collection[str], dtype: torch.dtype) -> None:
        stored = (n for n in names.producers if names.graph.values[names.of[n]].kind is ValueKind.WEIGHT)
        self._stored = {node: names.of[node] in wide for node in stored}
        self._dtype = dtype
        backend = _MixedBackend(names, wide, dtype)
        super().__init__(whole.program, whole.placed, backend, whole.device, converted_only=True)

    def _weight(self, node: fx.Node, place: Placeholder) -> Pair:
        if node not in self._stored:
            return super()._weight(node, place)
        exact = self._reference_weight(node)
        return exact, exact if self._stored[node] else self.backend.represent(exact, self._dtype)
