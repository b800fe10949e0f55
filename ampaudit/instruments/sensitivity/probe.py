"""Measures the effect of rounding each value on the outputs, with one backward pass per probe.

To first order, roundings e_i of independent values add ``sum_i E_v sum_j (g_ij e_ij)^2`` to the squared error
of an output, where ``g_i = J_i^T v`` for a vector v of random signs (Hutchinson, 1990). One vector-Jacobian
product yields the terms of all values, and of all casts of a value for one of its readers.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.errors import RunFailed, first_line
from ampaudit.core.ops import having
from ampaudit.instruments.backward.passes import (
    BackwardPass,
    CustomBackwards,
    FaultSource,
    GradientObserver,
    GradientPair,
)
from ampaudit.instruments.backward.vjp import Tape, TapeEntry
from ampaudit.policy.schema import Cast
from ampaudit.run.backends import Emulated, Float32Backend, rounded
from ampaudit.run.device import restore_random_state
from ampaudit.run.lockstep import LockStep, Observer, StepCall, resolved
from ampaudit.run.measure import fetch
from ampaudit.run.program import Program, Step
from ampaudit.trace.caster import FIXED_REASONS
from ampaudit.trace.flatten import is_mark
from ampaudit.trace.functional import DETACH_OPS, OnCopy, overload_of
from ampaudit.trace.graph import Role, Site, Slot
from ampaudit.trace.internals import decomposition_table
from ampaudit.trace.opnames import base_name
from ampaudit.trace.values import LOW_PRECISION_DTYPES, WIDE, float_value, widened_tensor, widened_value

# dtypes of results that stay wide although 16 bits were requested, of ops that write to float32 statistics
_FLOAT32 = frozenset({torch.float32, torch.complex64})

BackwardKind = Literal["gradient", "jump"]
_UNDIFFERENTIABLE = "is not differentiable with respect to argument"
Key = TypeVar("Key", bound=Hashable)
Row = np.ndarray[Any, np.dtype[np.float64]]


class Collected(NamedTuple):
    """The squared errors of one probe: by value, by value and reader, and by op for its backward."""

    own: dict[str, float]
    reads: dict[tuple[str, str], float]
    backward: dict[tuple[str, BackwardKind], float]


@dataclass(frozen=True, slots=True)
class ProbedColumn:
    """The mean of the probes of some outputs of a batch."""

    name: str  # name of the outputs and the batch
    own: dict[str, float]  # error added by rounding each value, if it is in 16 bits
    reads: list[tuple[str, str, float]]  # value, reader, and error added by casting the value for the reader
    backward: list[tuple[str, BackwardKind, float]]  # value, kind, and error added by the backward of its op


@dataclass(slots=True)
class SensitivityPart:
    """The results of the probes of some batches."""

    columns: list[ProbedColumn] = field(default_factory=list)  # columns of all batches, in order
    probes: int = 0  # number of backward passes
    # squared error of all gradients relative to their squares, by batch, if those are probed
    measured: list[float] = field(default_factory=list)

    def add(self, name: str, probes: Sequence[Collected]) -> None:
        """Add a column: the mean of its probes, in which missing entries count as 0."""
        self.probes += len(probes)
        own = _mean([one.own for one in probes])
        reads = [(*pair, energy) for pair, energy in _mean([one.reads for one in probes]).items()]
        backward = [(*pair, energy) for pair, energy in _mean([one.backward for one in probes]).items()]
        self.columns.append(ProbedColumn(name, own, reads, backward))

    def joined(self, later: SensitivityPart) -> SensitivityPart:
        """Return the results of both, those of later batches last."""
        return SensitivityPart(
            self.columns + later.columns, self.probes + later.probes, self.measured + later.measured
        )


def _mean(probes: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    keys = dict.fromkeys(key for one in probes for key in one)
    return {key: sum(one.get(key, 0.0) for one in probes) / len(probes) for key in keys}


class DifferentiableBackend(Float32Backend):
    """FP32 ops with a gradient for every floating-point input, whether or not training has one."""

    follows_writes = True

    def call_differentiably(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op, by a formula where autograd has no derivative."""
        if str(step.target) in DETACH_OPS:
            return torch.ops.aten.alias.default(args[0])
        op = overload_of(step.target)
        if op is not None and base_name(op).rstrip("_") in having("whole_number"):
            with torch.no_grad():  # its derivative is 0, which autograd lacks for some
                return super().call_differentiably(step, args, kwargs)
        if step.target is torch.ops.aten.batch_norm.default:
            x, weight, bias, mean, variance, training, _, eps, *_ = args
            if training:  # running statistics are only written to
                return step.target(x, weight, bias, None, None, *args[5:], **kwargs)
            # by ops, so that autograd differentiates by running statistics as well
            shape = (1, -1, *[1] * (x.dim() - 2))
            result = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + eps)
            result = result if weight is None else result * weight.view(shape)
            return result if bias is None else result + bias.view(shape)
        try:
            return super().call_differentiably(step, args, kwargs)
        except RuntimeError as error:
            if _UNDIFFERENTIABLE not in str(error):
                raise
        return _by_parts(step.target, args, kwargs)


def _by_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op by its decomposition, whose parts have the gradients that the op lacks.

    Without a decomposition, inputs that autograd cannot differentiate are detached.
    """
    if op in decomposition_table:  # on copies, since running statistics are written to
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with contextlib.suppress(IndexError):  # an ignored class is no index of the classes' weights
            return decomposition_table[op](*args, **kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in leaves]
    for index, value in enumerate(leaves):
        alone = [*detached[:index], value, *detached[index + 1 :]]
        some, keywords = pytree.tree_unflatten(alone, structure)
        try:
            op(*some, **keywords)
        except RuntimeError:
            leaves[index] = detached[index]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return op(*args, **kwargs)


@dataclass(slots=True)
class Sensitivities:
    """Squared error of outputs, relative to their squares, by what is rounded."""

    # names of the outputs (of a batch) to which the numbers of each row belong
    columns: list[str] = field(default_factory=list)
    # error added by rounding each value, if it is in 16 bits
    own: dict[str, Row] = field(default_factory=dict)
    # error added by casting a float32 value for a reader in 16 bits, by value and reader
    reads: dict[tuple[str, str], Row] = field(default_factory=dict)
    # error added by the backward of a value's op, through rounding or jumps of its derivative
    backward: dict[tuple[str, BackwardKind], Row] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Sequence[ProbedColumn]) -> Sensitivities:
        """Return the table of some columns, in which missing entries count as 0."""
        return cls(
            [column.name for column in columns],
            _table([column.own for column in columns]),
            _table([{(value, reader): e for value, reader, e in column.reads} for column in columns]),
            _table([{(value, kind): e for value, kind, e in column.backward} for column in columns]),
        )

    def predicted(self, wide: Collection[str]) -> Row:
        """Return the relative squared error of each column with these values in float32.

        Errors of the backward pass do not depend on this choice.
        """
        total = sum(self.backward.values(), np.zeros(len(self.columns)))
        for name, row in self.own.items():
            if name not in wide:
                total += row
        for (value, reader), row in self.reads.items():
            if value in wide and reader not in wide:
                total += row
        return total


def _table(columns: Sequence[Mapping[Key, float]]) -> dict[Key, Row]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: np.array([column.get(key, 0.0) for column in columns]) for key in keys}


class ErrorCollector(GradientObserver):
    """Adds up (g e)^2 by value and by reader, on the device."""

    def __init__(self, names: ValueNames, tape: ErrorTape, dtype: torch.dtype) -> None:
        self._names, self._tape, self._dtype = names, tape, dtype
        self._references = tape.references
        self.own: dict[str, torch.Tensor] = {}
        self.reads: dict[tuple[str, str], torch.Tensor] = {}
        self.backward: dict[tuple[str, BackwardKind], torch.Tensor] = {}

    def observe_share(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Add the effect of rounding a value for one reader."""
        names = self._names
        if step.node in names.producers and of in names.of:
            reader = names.graph.values[names.of[step.node]]
            if reader.kind is ValueKind.OP or reader.converts:
                self._add(self.reads, (names.of[of], reader.name), pair[0], self._rounding(of))
        return pair[1]

    def observe_total(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Add the effect of rounding a value, or an item of several."""
        names = self._names
        if node in names.producers or (node in names.of and node.target is operator.getitem):
            self._add(self.own, names.of[node], pair[0], self._own_error(node))
        return pair[1]

    def decide(self, node: fx.Node, gradient: torch.Tensor) -> None:
        """Add the effect of rounding a value for decisions based on it, which pass no gradient."""
        names = self._names
        for user in node.users:
            is_op = user in names.producers and names.graph.values[names.of[user]].kind is ValueKind.OP
            if is_op and float_value(user.meta.get("val")) is None:
                self._add(self.reads, (names.of[node], names.of[user]), gradient, self._rounding(node))

    def add_backward(
        self, node: fx.Node, kind: BackwardKind, effect: torch.Tensor, error: torch.Tensor
    ) -> None:
        """Add the effect of an error in a gradient that the node's op computes."""
        if node in self._names.of:
            # a jump moves a gradient from one element to another: elements of a row err together
            self._add(self.backward, (self._names.of[node], kind), effect, error, by_row=kind == "jump")

    def fetched(self) -> Collected:
        """Return everything as numbers, fetched from the device at once."""
        tables: tuple[dict[Any, torch.Tensor], ...] = (self.own, self.reads, self.backward)
        every = [energy for table in tables for energy in table.values()]
        numbers = iter(fetch(energy.to(every[0].device) for energy in every))
        return Collected(*({key: next(numbers) for key in table} for table in tables))

    def _own_error(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "placeholder":
            stored = self._names.graph.values[self._names.of[node]].kind is ValueKind.WEIGHT
            return self._rounding(node) if stored else None
        if node.target is operator.getitem:
            source, index = node.args
            several = self._tape.errors.get(source) if isinstance(source, fx.Node) else None
            return several[index] if isinstance(several, list) and isinstance(index, int) else None
        error = self._tape.errors.get(node)
        return error if isinstance(error, torch.Tensor) else None

    def _rounding(self, node: fx.Node) -> torch.Tensor | None:
        reference = self._references.get(node)
        if not isinstance(reference, torch.Tensor):
            return None
        return error_where_finite(
            rounded(reference.detach(), self._dtype), widened_tensor(reference.detach())
        )

    def _add(
        self,
        into: dict[Any, torch.Tensor],
        key: Any,
        gradient: torch.Tensor,
        error: torch.Tensor | None,
        *,
        by_row: bool = False,
    ) -> None:
        if error is None or error.shape != gradient.shape:
            return
        product = torch.nan_to_num(gradient.detach() * error, 0.0, 0.0, 0.0)
        if by_row and product.dim() > 1:
            product = product.flatten(1).sum(1)
        energy = torch.linalg.vector_norm(product).double().square()
        into[key] = into[key] + energy if key in into else energy


def probe(
    executor: LockStep,
    names: ValueNames,
    tape: ErrorTape,
    seed: Mapping[fx.Node, torch.Tensor],
    dtype: torch.dtype,
    *,
    decisions: bool = False,
) -> Collected:
    """Run the backward pass of a recorded run from the gradients of some outputs.

    With ``decisions``, these are values from which the outputs are decided.

    Raises:
        RunFailed: An op has no gradient.
    """
    collector = ErrorCollector(names, tape, dtype)
    customs = CustomBackwards(executor.program, Emulated(), executor.device)
    backend = DifferentiableBackend()
    dtypes: dict[fx.Node, tuple[torch.dtype | None, ...]]
    dtypes = dict.fromkeys(executor.program.inputs, (torch.float32,))
    for step in executor.program.steps:
        dtypes[step.node] = tuple(WIDE.get(d, d) if d is not None else None for d in step.dtypes)
    backward = BackwardPass(tape, dtypes, backend, customs, backend)
    try:
        backward.run({node: (gradient, gradient) for node, gradient in seed.items()}, collector)
    except (RuntimeError, NotImplementedError) as error:
        raise RunFailed(f"an op of the model has no gradient: {first_line(error)}") from error
    if decisions:
        for node, gradient in seed.items():
            collector.decide(node, gradient)
    return collector.fetched()


class ErrorTape(Tape):
    """Records FP32's values for backward passes, and the rounding error that each op adds in 16 bits."""

    def __init__(self, observer: Observer, needed: frozenset[fx.Node]) -> None:
        super().__init__(observer, needed)
        # difference of an op's results in 16 bits and in FP32 on the same inputs, by node; a list for ops
        # with several results
        self.errors: dict[fx.Node, Any] = {}
        self._exact = Float32Backend()

    @property
    def references(self) -> dict[fx.Node, Any]:
        """FP32's values of all nodes that are read by some step."""
        return {node: pair[0] for entry in self.steps for node, pair in entry.inputs.items()}

    @property
    def elements(self) -> int:
        """Number of elements whose gradients a backward pass over the tape computes, at least 1."""
        return sum(v.numel() for v in self.references.values() if isinstance(v, torch.Tensor)) or 1

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Record the step with FP32's inputs only, and the error of its result."""
        result = self._observer.observe(step, reference, value, call)
        if is_mark(step.target) or step.node in self.needed or step.decides:
            inputs = {node: (pair[0], pair[0]) for node, pair in call.inputs.items()}
            self.steps.append(TapeEntry(step, inputs, True, call.state))
        if step.low_precision and step.makes_values and not call.computed_once and not step.mutates:
            self.errors[step.node] = self._error(step, result, call)
        return result

    def _error(self, step: Step, value: Any, call: StepCall) -> Any:
        inputs = {n: (widened_value(p[1]), None) for n, p in call.inputs.items()}
        args, kwargs = resolved(self._exact.arguments(step), inputs, 0)
        if call.state is not None:
            device = next((p[0].device for p in inputs.values() if isinstance(p[0], torch.Tensor)), None)
            restore_random_state(call.state, device or torch.device("cpu"))
        exact = self._exact.call(step, args, kwargs)
        if isinstance(exact, torch.Tensor):
            return error_where_finite(value, exact)
        return [
            error_where_finite(v, x) if isinstance(x, torch.Tensor) else None
            for v, x in zip(value, exact, strict=True)
        ]


def error_where_finite(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the rounding error of finite elements; 0 for elements that overflow."""
    if value.shape != exact.shape or not (exact.is_floating_point() or exact.is_complex()):
        return torch.zeros_like(exact)
    return torch.nan_to_num(widened_tensor(value) - exact, 0.0, 0.0, 0.0)


def float_nodes(program: Program) -> frozenset[fx.Node]:
    """Return the nodes with floating-point values, which may have gradients."""
    inputs = (node for node in program.inputs if float_value(node.meta.get("val")) is not None)
    floats = (
        step.node
        for step in program.steps
        if any(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in step.dtypes)
    )
    return frozenset((*inputs, *floats))


class ValueKind(StrEnum):
    """The reason for the precision of a value."""

    OP = "op"  # a rule about its op
    WEIGHT = "weight"  # how it is stored
    FOLLOW = "follow"  # its inputs: float32 if one of them is, as for x.to(y.dtype)
    FLOAT32 = "float32"  # always float32: an input of the model, or an op without a 16-bit kernel
    LOW = "low"  # always 16 bits: an input in 16 bits, or a cast in the model's code


@dataclass(frozen=True, slots=True)
class PrecisionValue:
    """A computed value, a weight or an input."""

    name: str  # the site's id, or the name of the weight or input
    kind: ValueKind  # reason for its precision
    low: bool  # whether it is in 16 bits as traced
    site: Site | None = None  # the site that computes it, if any
    is_weight: bool = False  # whether it is a parameter, a buffer or a constant

    @property
    def free(self) -> bool:
        """Whether a policy may choose its precision."""
        return self.kind in (ValueKind.OP, ValueKind.WEIGHT)

    @property
    def converts(self) -> bool:
        """Whether it is a cast in the model's code."""
        return self.site is not None and self.site.role is Role.CAST


@dataclass(slots=True)
class PrecisionGraph:
    """The values of a model in graph order, and what each op reads, by name."""

    values: dict[str, PrecisionValue] = field(default_factory=dict)
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def merge(self, other: PrecisionGraph) -> None:
        """Add the values and reads of another graph of the model."""
        for name, value in other.values.items():
            self.values.setdefault(name, value)
        for name, sources in other.reads.items():
            self.reads[name] = tuple(dict.fromkeys((*self.reads.get(name, ()), *sources)))

    def keep_low(self, casts: Collection[str]) -> None:
        """Mark casts in the model's code as casts to 16 bits, whatever their input."""
        for name in casts:
            if name in self.values:
                self.values[name] = replace(self.values[name], kind=ValueKind.LOW)

    def readers(self) -> Iterator[tuple[PrecisionValue, PrecisionValue]]:
        """Yield each pair of a value and an op that reads it."""
        for name, sources in self.reads.items():
            for source in sources:
                yield self.values[source], self.values[name]

    def in_float32(self, chosen: Collection[str]) -> frozenset[str]:
        """Return all values that are in float32 if these ops and weights are."""
        wide: set[str] = set()
        for name, value in self.values.items():
            follows = value.kind is ValueKind.FOLLOW and not wide.isdisjoint(self.reads.get(name, ()))
            if follows or value.kind is ValueKind.FLOAT32 or (value.free and name in chosen):
                wide.add(name)
        return frozenset(wide)


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The values of one program."""

    graph: PrecisionGraph  # values by name
    # name of each node's value; views, tuple items, and lossless casts have another node's value
    of: dict[fx.Node, str]
    producers: frozenset[fx.Node]  # nodes with a value of their own
    # nodes of floating-point values among the arguments of each producer
    sources: dict[fx.Node, tuple[fx.Node, ...]]


def values_of(executor: LockStep) -> ValueNames:
    """Return the values of a program."""
    program = executor.program
    graph, of = PrecisionGraph(), dict[fx.Node, str]()
    producers, sources = set[fx.Node](), dict[fx.Node, tuple[fx.Node, ...]]()
    places = {place.node: place for place in program.traced.placeholders}

    def add(node: fx.Node, value: PrecisionValue) -> None:
        graph.values[value.name] = value
        of[node] = value.name
        producers.add(node)

    for node in filter(_is_float, program.inputs):
        place = places[node.name]
        low = place.dtype in LOW_PRECISION_DTYPES
        stored = place.slot is not Slot.INPUT and (
            node.name in executor.converted.copies or place.name in program.traced.rounded
        )
        kind = ValueKind.WEIGHT if stored else ValueKind.LOW if low else ValueKind.FLOAT32
        add(node, PrecisionValue(place.name, kind, low, is_weight=place.slot is not Slot.INPUT))
    for step in program.steps:
        node = step.node
        if node.target is operator.getitem or _keeps_value(step):
            if node.all_input_nodes[0] in of:
                of[node] = of[node.all_input_nodes[0]]
            continue
        inputs = tuple(source for source in node.all_input_nodes if source in of)
        if inputs or _is_float(node):
            name = step.site.id if step.site is not None else node.name
            add(node, PrecisionValue(name, _kind(step), step.low_precision, step.site))
            sources[node] = inputs
            # an in-place op has the precision of the tensor that it writes to, whatever else it reads
            deciding = inputs[:1] if _in_place(step) else inputs
            graph.reads[name] = tuple(dict.fromkeys(of[source] for source in deciding))
    return ValueNames(graph, of, frozenset(producers), sources)


def _kind(step: Step) -> ValueKind:
    site = step.site
    if site is None or _in_place(step):
        return ValueKind.FOLLOW
    decision = site.decision
    if decision.cast is Cast.LOWER and not step.low_precision and not _FLOAT32.isdisjoint(step.dtypes):
        return ValueKind.FLOAT32
    if decision.cast is Cast.LOWER and site.facts is not None and decision.reason not in FIXED_REASONS:
        return ValueKind.OP
    wide = decision.cast in (Cast.FORBID, Cast.FLOAT32) and not step.low_precision
    return ValueKind.FLOAT32 if wide else ValueKind.FOLLOW


def _in_place(step: Step) -> bool:
    return step.in_place or isinstance(step.node.target, OnCopy)


def _keeps_value(step: Step) -> bool:
    """Return whether an op keeps its input's value: a view, or a lossless cast."""
    if step.site is None or not step.node.all_input_nodes or step.node.target is torch.ops.aten.view.dtype:
        return False
    role = step.site.role
    return role is Role.VIEW or role.inserted or (role is Role.CAST and not step.low_precision)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return float_value(value) is not None or (isinstance(value, torch.Tensor) and value.is_complex())
