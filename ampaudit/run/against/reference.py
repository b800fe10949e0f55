"""Runs a reference model beside an audited one, and compares the two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ampaudit.core.errors import InputError, ReferenceBroken
from ampaudit.core.text import format_number, short_op
from ampaudit.run.against.comparison import ModelComparison, ModelDifference
from ampaudit.run.against.graph import ComparedGraph, Op
from ampaudit.run.against.matching import Matching
from ampaudit.run.against.values import Values, plain_value
from ampaudit.run.against.weights import LEAST_CLAMPED, MatchedWeight, difference_of, match_weights
from ampaudit.run.backends import Float32Backend
from ampaudit.run.config import RunConfig
from ampaudit.run.executors import ExecutorCache
from ampaudit.run.fp32_check import is_broken
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer
from ampaudit.run.record import RunRecord
from ampaudit.source.interface import Batch
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["ReferenceModel", "compare_executors"]

_SMALLEST = {torch.float16: 1.2e-7}  # what converters replace smaller numbers by
_JUMP = 4
_TRANSPOSED = "is transposed"
_IDENTITIES = frozenset(
    "dropout feature_dropout alpha_dropout clone contiguous alias detach lift_fresh".split()
)
_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
_NUMBERS_ONLY = ("eps", "other", "exponent", "min", "max", "value", "alpha", "beta", "scale", "self")
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


def model_differences(
    found: Matching,
    weights: Mapping[fx.Node, MatchedWeight],
    dtype: torch.dtype,
    wrong: Mapping[str, fx.Node],
) -> list[ModelDifference]:
    """Return what differs, in graph order; ops that compute something else only where outputs are wrong.

    Args:
        found: the matched graphs.
        weights: the matched weights.
        dtype: the 16-bit dtype, which rounds constants.
        wrong: outputs of the audited graph that differ, by name.
    """
    search = _Search(found, weights, dtype)
    structural = {(d.kind, d.place): d for d in search.structural()}
    roots: dict[Op, list[str]] = {}
    changed = {key[1] for key in structural}
    for name, node in wrong.items():
        for op in search.roots(node):
            sources = (found.audited.ops.get(source) for source in op.sources)
            candidates = (o for o in (op, *sources) if o is not None and o.site.id in changed)
            roots.setdefault(next(candidates, op), []).append(name)
    result = dict(structural)
    for op, names in roots.items():
        known = [key for key in structural if key[1] == op.site.id]
        for key in known:
            d = structural[key]
            result[key] = ModelDifference(d.kind, d.site, d.counterpart, d.what, tuple(names))
        if not known:
            made = search.explained(op, tuple(names))
            result[made.kind, made.place] = made
    order = {op.site.id: op.place for op in found.audited.ops.values()}
    return sorted(result.values(), key=lambda d: (not d.outputs, order.get(d.place, math.inf)))


class _Search:
    def __init__(self, found: Matching, weights: Mapping[fx.Node, MatchedWeight], dtype: torch.dtype) -> None:
        self._found = found
        self._weights = weights
        self._dtype = dtype

    def structural(self) -> Iterator[ModelDifference]:
        """Yield constants, weights and ops that differ, whether or not it shows."""
        yield from self._missing()
        for op, other in self._found.partner.items():
            if op.base == other.base and (what := self._constants(op, other)):
                yield ModelDifference("constant", op.site, other.site, what)
            if what := self._other_weight(op, other):
                yield ModelDifference("weight", op.site, other.site, what)
        for op in self._found.audited.ops.values():
            for source in op.sources:
                match = self._weights.get(source)
                if match is not None and match.what and not match.clamped and match.what != _TRANSPOSED:
                    name = self._found.audited.weight_name(source)
                    partner = self._found.partner.get(op)
                    site = None if partner is None else partner.site
                    yield ModelDifference("weight", op.site, site, f"{name} {match.what}")

    def _other_weight(self, op: Op, other: Op) -> str:
        """Describe a weight without a counterpart in place of one of the reference."""
        here, there = self._found.audited, self._found.reference
        known = {self._weights[s].other for s in op.sources if s in self._weights}
        free = [s for s in other.sources if s in there.weights and s not in known]
        for source in op.sources:
            tensor = here.weights.get(source)
            if tensor is None or source in self._weights or tensor.numel() < 2:
                continue
            for same in (s for s in free if there.weights[s].shape == tensor.shape):
                return f"{here.weight_name(source)} {difference_of(there.weights[same], tensor)}"
        return ""

    def roots(self, output: fx.Node) -> list[Op]:
        """Return the ops before an output at which values begin to differ."""
        graph = self._found.audited
        first = graph.ops.get(graph.source(output))
        pending, seen = [first] if first is not None else [], set()
        roots: list[Op] = []
        while pending:
            op = pending.pop()
            if op in seen:
                continue
            seen.add(op)
            sources = (graph.ops.get(source) for source in op.sources)
            before = [o for o in sources if o is not None and not self._found.agrees(o)]
            pending += before
            if not before and self._jumps(op):
                roots.append(op)
        graph = self._found.audited
        varying = [op for op in roots if not graph.is_constant(op)]
        return sorted({self._suspect(op, seen) for op in varying or roots}, key=lambda op: op.place)

    def _jumps(self, op: Op) -> bool:
        """Return whether an op adds most of its error itself; otherwise rounding has added up."""
        sources = (self._found.audited.ops.get(source) for source in op.sources)
        before = max((self._found.error(o) for o in sources if o is not None), default=0.0)
        return self._found.error(op) > _JUMP * before

    def _suspect(self, op: Op, bad: set[Op]) -> Op:
        """Return the op to name: in a part without counterparts, the one whose weight is another."""
        if self._found.audited.is_constant(op):
            return op
        region = [op]
        while region[-1] not in self._found.partner:
            following = [r for r in self._found.audited.readers.get(region[-1].node, ()) if r in bad]
            if not following:
                break
            region.append(following[0])
        for each in region:
            unknown = (s for s in each.sources if s in self._found.audited.weights and s not in self._weights)
            if any(self._found.audited.weights[s].numel() > 1 for s in unknown) or self._weight(each):
                return each
        if region[-1] in self._found.partner and self._stray(op) is None:
            return region[-1]
        return op

    def _weight(self, op: Op) -> str:
        """Describe a weight of an op that is another, or stored as only another kind of op takes it."""
        graph = self._found.reference
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
        other = self._found.partner.get(op)
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
            what = self._arguments(op, other) or self._operator(op, other) or "it computes other values"
        clamped = other is not None and self._clamped(op, other)
        return ModelDifference("clamped" if clamped else "value", op.site, site, what, outputs)

    def _clamped(self, op: Op, other: Op) -> bool:
        """Return whether a number that the format lacks is another large one, as in masks."""
        here, there = self._found.audited.arguments(op), self._found.reference.arguments(other)
        pairs = [(here[n], there[n]) for n in here.keys() & there.keys() & set(_NUMBERS_ONLY)]
        known = [(float(a), float(b)) for a, b in pairs if _is_number(a) and _is_number(b) and a != b]
        return bool(known) and all(a < 0 and self._rounded(a, b) for a, b in known)

    def _view(self, op: Op, other: Op) -> Site | None:
        """Return the view of an operand that has the elements of the reference's in another order."""
        for here, there in zip(op.operands, other.operands, strict=False):
            source = self._found.audited.source(here)
            moved = source is not here and not self._found.same_value(there, here)
            if moved and self._found.source(source) is self._found.reference.source(there):
                return self._first_view(here)
        return None

    def _stray(self, op: Op) -> Site | None:
        """Return the view of an operand whose elements the reference has nowhere in that order."""
        for here in op.operands:
            source = self._found.audited.source(here)
            if source is not here and source in self._found.audited.ops and here not in self._found.agreeing:
                return self._first_view(here)
        return None

    def _first_view(self, node: fx.Node) -> Site | None:
        """Return the first of the views before a value that arranges elements as the reference never does."""
        sites = self._found.audited.traced.site_of_node
        views = list(_chain(node, self._found.audited.source(node)))[::-1]
        named = [view for view in views if view.name in sites]
        stray = (sites[view.name] for view in named if view not in self._found.agreeing)
        return next(stray, sites[named[0].name] if named else None)

    def _operator(self, op: Op, other: Op) -> str:
        """Describe another kind of op."""
        if op.base == other.base:
            return ""
        return f"it computes {op.base}, and the reference {other.base}"

    def _missing(self) -> Iterator[ModelDifference]:
        """Yield ops that pass their input on almost unchanged here, and that the audited graph lacks."""
        found = self._found
        back = {other: op for op, other in found.partner.items()}
        for other in found.only_reference:
            if other.base in _IDENTITIES or _is_identity(found.reference, other):
                continue
            given = [s for n, s in zip(other.operands, other.sources, strict=True) if self._close(n, other)]
            for reader in found.reference.readers.get(other.node, ()):
                here = back.get(reader)
                if here is None or not given:
                    continue
                sources = [found.source(source) for source in here.sources]
                if other.node in sources or not (set(given) & set(sources) or self._reads(here, given)):
                    continue
                yield ModelDifference("missing", here.site, other.site, _call(found.reference, other))
                break

    def _reads(self, op: Op, given: list[fx.Node]) -> bool:
        """Return whether an op reads the value of a node of the reference."""
        return any(self._found.same_value(g, n) for g in given for n in op.operands)

    def _close(self, node: fx.Node, op: Op) -> bool:
        values = self._found.reference.values
        first, second = values.get(node), values.get(op.node)
        if first is None or second is None or first[0] != second[0]:
            return False
        difference = (first[1] - second[1]).abs()
        return bool((difference <= 1e-3 * first[1].abs() + 1e-5).all())

    def _constants(self, op: Op, other: Op) -> str:
        """Describe numbers that differ by more than rounding, of ops that take them in the same places."""
        here, there = (
            graph.arguments(o) for graph, o in ((self._found.audited, op), (self._found.reference, other))
        )
        for name in here.keys() & there.keys():
            first, second = here[name], there[name]
            numbers = name in _NUMBERS_ONLY and _is_number(first) and _is_number(second)
            if numbers and not self._rounded(float(first), float(second)):
                return f"{name} is {_shown(float(first))}, and {_shown(float(second))} in the reference"
        return ""

    def _rounded(self, here: float, there: float) -> bool:
        if here == there or (math.isnan(here) and math.isnan(there)):
            return True
        if abs(there) > torch.finfo(self._dtype).max and here * there > 0:
            return abs(here) >= LEAST_CLAMPED or abs(here - there) <= 1e-6 * abs(there)
        if here == 0.0:
            return False
        smallest = _SMALLEST.get(self._dtype, 0.0) if abs(there) >= 1e-7 else 0.0
        return abs(here - there) <= 2 * torch.finfo(self._dtype).eps * abs(there) + smallest

    def _arguments(self, op: Op, other: Op) -> str:
        """Describe arguments that differ."""
        if op.base != other.base:
            return ""
        here, there = self._found.audited.arguments(op), self._found.reference.arguments(other)
        for name in [n for n in here if n in there]:
            first, second = plain_value(here[name]), plain_value(there[name])
            if first is not None and second is not None and first != second:
                return f"{name} is {_shown(first)}, and {_shown(second)} in the reference"
        return ""


def _chain(node: fx.Node, source: fx.Node) -> Iterator[fx.Node]:
    """Yield the views from a value back to what made it."""
    while node is not source:
        yield node
        node = node.all_input_nodes[0]


def _is_identity(graph: ComparedGraph, op: Op) -> bool:
    """Return whether an op changes nothing, whatever its input is."""
    neutral = _NEUTRAL.get(op.base)
    other = graph.arguments(op).get("exponent" if op.base == "pow" else "other")
    return neutral is not None and _is_number(other) and other == neutral


def _call(graph: ComparedGraph, op: Op) -> str:
    """Return an op with its numbers, as in ``add(1e-08)``."""
    numbers = [format_number(float(v)) for v in graph.arguments(op).values() if isinstance(v, float)]
    return (
        f"{short_op(op.site.op).split('.')[0]}({', '.join(numbers[:3])})" if numbers else short_op(op.site.op)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
