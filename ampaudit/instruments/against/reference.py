"""Runs a reference model beside an audited one, and compares the two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ampaudit.core.errors import InputError, ReferenceBroken
from ampaudit.core.ops import having
from ampaudit.core.text import format_number, is_number, short_op
from ampaudit.instruments.against.matching import (
    MIN_CLAMPED,
    ComparedGraph,
    MatchedWeight,
    Matching,
    Op,
    Values,
    difference_of,
    match_weights,
    plain_value,
)
from ampaudit.run.backends import Float32Backend
from ampaudit.run.comparison import ModelComparison, ModelDifference
from ampaudit.run.config import RunConfig
from ampaudit.run.fp32_check import is_broken
from ampaudit.run.lockstep import LockStep, Observer
from ampaudit.run.record import RunRecord
from ampaudit.run.runner import ExecutorCache
from ampaudit.source.interface import Batch
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES

_SMALLEST = {torch.float16: 1.2e-7}  # converters replace smaller numbers by this
_JUMP = 4
_TRANSPOSED = "is transposed"
_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
_NUMBERS_ONLY = ("eps", "other", "exponent", "min", "max", "value", "alpha", "beta", "scale", "self")
_ROUNDED_CONSTANTS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
_EXACT = 2e-4


class ReferenceModel:
    """Runs a reference model in FP32 on the batches on which another model is audited.

    ``places`` are, for each input of the audited model, the positions of the reference's inputs.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], config: RunConfig, places: Sequence[int]
    ) -> None:
        plain = RunConfig(
            None,
            config.author_rules,
            config.number_format,
            config.device,
            config.seed,
            release=config.release,
        )
        self._executors = ExecutorCache(model, plain, RunRecord(device=config.device.type, backend=""))
        self._batches = batches
        self._places = places
        self._seed = config.seed

    def __call__(
        self, executor: LockStep, audited_inputs: list[torch.Tensor], number: int
    ) -> ModelComparison:
        """Run the reference on a batch, and compare the audited model, widened to float32, with it.

        Raises:
            ReferenceBroken: The reference returns NaN or infinity.
            InputError: The models have different numbers of outputs.
        """
        batch, seed = self._batches[number], self._seed + number
        reference = self._executors.get(batch, number)
        inputs = tensor_leaves(batch.args, batch.kwargs)
        with torch.no_grad():
            torch.manual_seed(seed)
            outputs = [pair[0] for pair in reference.run(inputs, Observer())]
            output_places = _output_places(reference, executor)
            by_name = {name: outputs[place] for name, place in output_places.items()}
            broken = next((name for name, output in by_name.items() if is_broken(output)), None)
            if broken is not None:
                where = batch.title(number)
                raise ReferenceBroken(f"the reference itself gives NaN or infinity in {where}: {broken}")
            program, device = executor.program, executor.device
            exact = LockStep(program, executor.placed, Float32Backend(), device, reference_only=True)
            audited = _recorded(exact, audited_inputs, seed)
            plain = ComparedGraph(reference, Values(reference, inputs))
            weights = match_weights(plain, audited)
            compared = _recorded(_with_rounded_weights(reference, audited, weights), inputs, seed)
            dtypes = {place.dtype for place in program.traced.placeholders}
            dtypes |= {site.dtype for site in program.traced.sites}
            dtype = next((dtype for dtype in LOW_PRECISION_DTYPES if dtype in dtypes), torch.float32)
            tolerance = _ROUNDED_CONSTANTS.get(dtype, _EXACT)
            pairs = {
                node: compared.inputs[place] for node, place in zip(audited.inputs, self._places, strict=True)
            }
            matching = Matching(compared, audited, pairs, weights, tolerance)
            counterpart = {name: reference.program.outputs[place] for name, place in output_places.items()}
            wrong = {
                name: node
                for name, node in audited.outputs.items()
                if name in counterpart and not matching.same_value(counterpart[name], node)
            }
            differences = _Search(matching, weights, dtype).differences(wrong)
        return ModelComparison(
            tuple((op.site, other.site) for op, other in matching.partner.items()),
            tuple(op.site for op in matching.only_reference),
            tuple(op.site for op in matching.only_audited),
            tuple(differences),
            by_name,
        )


def _recorded(executor: LockStep, inputs: list[torch.Tensor], seed: int) -> ComparedGraph:
    values = Values(executor, inputs)
    torch.manual_seed(seed)
    executor.run(inputs, values)
    return ComparedGraph(executor, values)


def _with_rounded_weights(
    executor: LockStep, audited: ComparedGraph, weights: Mapping[fx.Node, MatchedWeight]
) -> LockStep:
    """Return an executor of the reference with the rounded weights of the audited graph."""
    masters = dict(executor.converted.masters)
    for node, match in weights.items():
        stored = audited.weights[node]
        if stored.dtype in LOW_PRECISION_DTYPES and not match.what:
            master = masters[match.other.name]
            same = stored.t() if match.transposed else stored
            masters[match.other.name] = same.reshape(master.shape).to(master.dtype)
    placed = replace(executor.converted, masters=masters)
    return LockStep(executor.program, placed, Float32Backend(), executor.device, reference_only=True)


def _output_places(reference: LockStep, audited: LockStep) -> dict[str, int]:
    """Return the positions of the reference's outputs by the audited graph's names, else in order."""
    here, there = audited.program.traced.outputs, reference.program.traced.outputs
    if set(here) <= set(there):
        return {name: there.index(name) for name in here}
    if len(here) != len(there):
        raise InputError(
            f"the audited model has {len(here)} outputs, and the reference {len(there)}",
            hint="compare models with the same outputs",
        )
    return {name: place for place, name in enumerate(here)}


class _Search:
    """Finds the differences between two graphs with matched ops."""

    def __init__(
        self, matching: Matching, weights: Mapping[fx.Node, MatchedWeight], dtype: torch.dtype
    ) -> None:
        self._matching = matching
        self._audited = matching.audited
        self._reference = matching.reference
        self._weights = weights
        self._dtype = dtype

    def differences(self, wrong: Mapping[str, fx.Node]) -> list[ModelDifference]:
        """Return the differences, first those with wrong outputs; other values count only with wrong outputs.

        ``wrong`` are the nodes of outputs of the audited graph that differ, by name.
        """
        structural = {(d.kind, d.site.id): d for d in self.structural()}
        roots: dict[Op, list[str]] = {}
        changed = {key[1] for key in structural}
        for name, node in wrong.items():
            for op in self.roots(node):
                sources = (self._audited.ops.get(source) for source in op.sources)
                candidates = (o for o in (op, *sources) if o is not None and o.site.id in changed)
                roots.setdefault(next(candidates, op), []).append(name)
        result = dict(structural)
        for op, names in roots.items():
            keys = [key for key in structural if key[1] == op.site.id]
            for key in keys:
                result[key] = replace(structural[key], outputs=tuple(names))
            if not keys:
                difference = self.explained(op, tuple(names))
                result[difference.kind, difference.site.id] = difference
        order = {op.site.id: op.place for op in self._audited.ops.values()}
        return sorted(result.values(), key=lambda d: (not d.outputs, order.get(d.site.id, math.inf)))

    def structural(self) -> Iterator[ModelDifference]:
        """Yield constants, weights and missing ops that differ, whether or not outputs do."""
        yield from self._missing()
        for op, other in self._matching.partner.items():
            if op.base == other.base and (what := self._constants(op, other)):
                yield ModelDifference("constant", op.site, other.site, what)
            if what := self._other_weight(op, other):
                yield ModelDifference("weight", op.site, other.site, what)
        for op in self._audited.ops.values():
            for source in op.sources:
                match = self._weights.get(source)
                if match is not None and match.what and not match.clamped and match.what != _TRANSPOSED:
                    name = self._audited.weight_name(source)
                    partner = self._matching.partner.get(op)
                    site = None if partner is None else partner.site
                    yield ModelDifference("weight", op.site, site, f"{name} {match.what}")

    def _other_weight(self, op: Op, other: Op) -> str:
        """Describe a weight without a counterpart that replaces one of the reference."""
        here, there = self._audited, self._reference
        partners = {self._weights[s].other for s in op.sources if s in self._weights}
        free = [s for s in other.sources if s in there.weights and s not in partners]
        for source in op.sources:
            tensor = here.weights.get(source)
            if tensor is None or source in self._weights or tensor.numel() < 2:
                continue
            for same in (s for s in free if there.weights[s].shape == tensor.shape):
                return f"{here.weight_name(source)} {difference_of(there.weights[same], tensor)}"
        return ""

    def roots(self, output: fx.Node) -> list[Op]:
        """Return the ops before an output at which values start to differ."""
        graph = self._audited
        first = graph.ops.get(graph.source(output))
        pending, visited = [first] if first is not None else [], set()
        roots: list[Op] = []
        while pending:
            op = pending.pop()
            if op in visited:
                continue
            visited.add(op)
            sources = [o for source in op.sources if (o := graph.ops.get(source)) is not None]
            before = [o for o in sources if not self._matching.agrees(o)]
            pending += before
            if not before:
                # a root adds most of its error itself, rather than inherit accumulated rounding
                inherited = max(map(self._matching.error, sources), default=0.0)
                if self._matching.error(op) > _JUMP * inherited:
                    roots.append(op)
        varying = [op for op in roots if not graph.is_constant(op)]
        return sorted({self._suspect(op, visited) for op in varying or roots}, key=lambda op: op.place)

    def _suspect(self, op: Op, bad: set[Op]) -> Op:
        """Return the op to report: in a region without counterparts, the one with a different weight."""
        if self._audited.is_constant(op):
            return op
        region = [op]
        while region[-1] not in self._matching.partner:
            following = [r for r in self._audited.readers.get(region[-1].node, ()) if r in bad]
            if not following:
                break
            region.append(following[0])
        for each in region:
            unknown = (s for s in each.sources if s in self._audited.weights and s not in self._weights)
            if any(self._audited.weights[s].numel() > 1 for s in unknown) or self._weight(each):
                return each
        if region[-1] in self._matching.partner and self._stray(op) is None:
            return region[-1]
        return op

    def _weight(self, op: Op) -> str:
        """Describe a weight of an op that differs, or is transposed for this kind of op."""
        graph = self._reference
        for source in op.sources:
            match = self._weights.get(source)
            if match is None:
                continue
            shape, readers = graph.weights[match.other].shape, graph.readers.get(match.other, ())
            flipped = op.base == "matmul" and source in op.operands and not match.transposed
            flipped &= len(set(shape)) == 1 < len(shape) and all(r.base == "linear" for r in readers)
            if match.what or flipped:
                return f"{graph.weight_name(match.other)} {match.what or _TRANSPOSED}"
        return ""

    def explained(self, op: Op, outputs: tuple[str, ...]) -> ModelDifference:
        """Describe an op that computes something else from inputs that agree."""
        other = self._matching.partner.get(op)
        site = None if other is None else other.site
        if what := self._weight(op):
            matches = [self._weights[s] for s in op.sources if s in self._weights]
            clamped = any(match.clamped for match in matches)
            return ModelDifference("clamped" if clamped else "weight", op.site, site, what, outputs)
        view = self._stray(op) if other is None else self._view(op, other)
        if view is not None:
            return ModelDifference("value", view, site, "it arranges the elements differently", outputs)
        if other is None:
            what = "no op of the reference computes its value"
        else:
            what = self._arguments(op, other) or "it computes other values"
        clamped = other is not None and self._clamped(op, other)
        return ModelDifference("clamped" if clamped else "value", op.site, site, what, outputs)

    def _clamped(self, op: Op, other: Op) -> bool:
        """Return whether only numbers beyond the format are replaced by other large ones, as in masks."""
        here, there = self._audited.arguments(op), self._reference.arguments(other)
        pairs = [(here[n], there[n]) for n in here.keys() & there.keys() & set(_NUMBERS_ONLY)]
        numbers = [(float(a), float(b)) for a, b in pairs if is_number(a) and is_number(b) and a != b]
        return bool(numbers) and all(a < 0 and self._rounded(a, b) for a, b in numbers)

    def _view(self, op: Op, other: Op) -> Site | None:
        """Return the view of an operand that arranges the reference's elements in another order."""
        for here, there in zip(op.operands, other.operands, strict=False):
            source = self._audited.source(here)
            rearranged = source is not here and not self._matching.same_value(there, here)
            if rearranged and self._matching.source(source) is self._reference.source(there):
                return self._first_view(here)
        return None

    def _stray(self, op: Op) -> Site | None:
        """Return the view of an operand whose arrangement of elements does not occur in the reference."""
        for here in op.operands:
            source = self._audited.source(here)
            if source is not here and source in self._audited.ops and here not in self._matching.agreeing:
                return self._first_view(here)
        return None

    def _first_view(self, node: fx.Node) -> Site | None:
        """Return the first view before a value whose arrangement does not occur in the reference."""
        sites = self._audited.traced.site_of_node
        views = list(_chain(node, self._audited.source(node)))[::-1]
        at_sites = [view for view in views if view.name in sites]
        stray = (sites[view.name] for view in at_sites if view not in self._matching.agreeing)
        return next(stray, sites[at_sites[0].name] if at_sites else None)

    def _missing(self) -> Iterator[ModelDifference]:
        """Yield ops that the audited graph lacks, and that hardly change their input here."""
        matching = self._matching
        back = {other: op for op, other in matching.partner.items()}
        for other in matching.only_reference:
            if other.base in having("identity", "dropout") or _is_identity(matching.reference, other):
                continue
            close_sources = [
                s for n, s in zip(other.operands, other.sources, strict=True) if self._close(n, other)
            ]
            for reader in matching.reference.readers.get(other.node, ()):
                here = back.get(reader)
                if here is None or not close_sources:
                    continue
                sources = {matching.source(source) for source in here.sources}
                reads = any(
                    source in sources or any(matching.same_value(source, node) for node in here.operands)
                    for source in close_sources
                )
                if reads and other.node not in sources:
                    yield ModelDifference("missing", here.site, other.site, _call(matching.reference, other))
                    break

    def _close(self, node: fx.Node, op: Op) -> bool:
        values = self._reference.values
        first, second = values.get(node), values.get(op.node)
        if first is None or second is None or first[0] != second[0]:
            return False
        difference = (first[1] - second[1]).abs()
        return bool((difference <= 1e-3 * first[1].abs() + 1e-5).all())

    def _constants(self, op: Op, other: Op) -> str:
        """Describe numeric arguments that differ by more than rounding."""
        here, there = self._audited.arguments(op), self._reference.arguments(other)
        for name in here.keys() & there.keys():
            first, second = here[name], there[name]
            numbers = name in _NUMBERS_ONLY and is_number(first) and is_number(second)
            if numbers and not self._rounded(float(first), float(second)):
                return f"{name} is {_as_text(float(first))}, and {_as_text(float(second))} in the reference"
        return ""

    def _rounded(self, here: float, there: float) -> bool:
        if here == there or (math.isnan(here) and math.isnan(there)):
            return True
        if abs(there) > torch.finfo(self._dtype).max and here * there > 0:
            return abs(here) >= MIN_CLAMPED or abs(here - there) <= 1e-6 * abs(there)
        if here == 0.0:
            return False
        smallest = _SMALLEST.get(self._dtype, 0.0) if abs(there) >= 1e-7 else 0.0
        return abs(here - there) <= 2 * torch.finfo(self._dtype).eps * abs(there) + smallest

    def _arguments(self, op: Op, other: Op) -> str:
        """Describe a difference in the kind of op or in its arguments."""
        if op.base != other.base:
            return f"it computes {op.base}, and the reference {other.base}"
        here, there = self._audited.arguments(op), self._reference.arguments(other)
        for name in [n for n in here if n in there]:
            first, second = plain_value(here[name]), plain_value(there[name])
            if first is not None and second is not None and first != second:
                return f"{name} is {_as_text(first)}, and {_as_text(second)} in the reference"
        return ""


def _chain(node: fx.Node, source: fx.Node) -> Iterator[fx.Node]:
    """Yield the views from a value back to the op or placeholder that it is a view of."""
    while node is not source:
        yield node
        node = node.all_input_nodes[0]


def _is_identity(graph: ComparedGraph, op: Op) -> bool:
    """Return whether an op is the identity for any input."""
    neutral = _NEUTRAL.get(op.base)
    other = graph.arguments(op).get("exponent" if op.base == "pow" else "other")
    return neutral is not None and is_number(other) and other == neutral


def _call(graph: ComparedGraph, op: Op) -> str:
    """Return an op with its numbers, as in ``add(1e-08)``."""
    name = short_op(op.site.op)
    numbers = [format_number(v) for v in graph.arguments(op).values() if isinstance(v, float)]
    return f"{name.split('.')[0]}({', '.join(numbers[:3])})" if numbers else name


def _as_text(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
