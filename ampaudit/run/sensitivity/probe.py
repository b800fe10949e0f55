"""Measures what the rounding of each value does to the outputs, with one backward pass per probe.

To first order, roundings e_i of independent values add ``sum_i E_v sum_j (g_ij e_ij)^2`` to the squared error
of an output, where ``g_i = J_i^T v`` for a vector v of random signs (Hutchinson, 1990). One vector-Jacobian
product gives the terms of all values, and of all casts of a value for one of its readers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.errors import RunFailed, first_line
from ampaudit.run.backends import Emulated, Float32Backend, rounded
from ampaudit.run.backward.backward import BackwardPass, GradientObserver, GradientPair
from ampaudit.run.backward.custom_backward import CustomBackwards, FaultSource
from ampaudit.run.backward.tape import Tape, TapeEntry
from ampaudit.run.device import restore_random_state
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer, StepCall, resolved
from ampaudit.run.program import Program
from ampaudit.run.sensitivity.precision_graph import ValueKind, ValueNames
from ampaudit.run.step import Step, widened_tensor, widened_value
from ampaudit.trace.flatten import is_mark
from ampaudit.trace.functional import DETACH_OPS
from ampaudit.trace.internals import decomposition_table
from ampaudit.trace.values import WIDE, float_value

__all__ = [
    "BackwardKind",
    "Collected",
    "DifferentiableBackend",
    "ErrorCollector",
    "ErrorTape",
    "Sensitivities",
    "SensitivityRecord",
    "finite_difference",
    "float_nodes",
    "probe",
]

BackwardKind = Literal["gradient", "jump"]
_UNDIFFERENTIABLE = "is not differentiable with respect to argument"
Key = TypeVar("Key", bound=Hashable)
Row = np.ndarray[Any, np.dtype[np.float64]]


class Collected(NamedTuple):
    """The squared errors that one probe found: by value, by value and reader, and by op for its backward."""

    own: dict[str, float]
    reads: dict[tuple[str, str], float]
    backward: dict[tuple[str, BackwardKind], float]


@dataclass(frozen=True, slots=True)
class ProbedColumn:
    """The mean of the probes of some outputs of a batch.

    Attributes:
        name: of the outputs and the batch.
        own: by value, what its own rounding adds where it is in 16 bits.
        reads: value, reader, and what casting the value for it adds.
        backward: value, kind, and what its op's backward adds.
    """

    name: str
    own: dict[str, float]
    reads: list[tuple[str, str, float]]
    backward: list[tuple[str, BackwardKind, float]]


@dataclass(slots=True)
class SensitivityRecord:
    """What the probes of some batches found.

    Attributes:
        columns: of all batches, in their order.
        probes: backward passes.
        measured: by batch, the squared error of all gradients relative to their squares, if those are probed.
    """

    columns: list[ProbedColumn] = field(default_factory=list)
    probes: int = 0
    measured: list[float] = field(default_factory=list)

    def add(self, name: str, probes: Sequence[Collected]) -> None:
        """Add a column: the mean of its probes."""
        self.probes += len(probes)
        self.columns.append(mean_of(name, probes))

    def join(self, later: SensitivityRecord) -> None:
        """Add the record of later batches."""
        self.columns += later.columns
        self.probes += later.probes
        self.measured += later.measured


def mean_of(name: str, probes: Sequence[Collected]) -> ProbedColumn:
    """Return the mean of some probes; what one of them lacks adds nothing there."""
    own = _mean([found.own for found in probes])
    reads = _mean([found.reads for found in probes])
    backward = _mean([found.backward for found in probes])
    return ProbedColumn(
        name,
        own,
        [(made, reader, energy) for (made, reader), energy in reads.items()],
        [(made, kind, energy) for (made, kind), energy in backward.items()],
    )


def _mean(probes: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    keys = dict.fromkeys(key for found in probes for key in found)
    return {key: sum(found.get(key, 0.0) for found in probes) / len(probes) for key in keys}


class DifferentiableBackend(Float32Backend):
    """FP32 ops with a gradient for every floating-point input, whether or not training has one."""

    follows_writes = True

    def differentiable(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the op's result by a formula where autograd stops."""
        if str(step.target) in DETACH_OPS:
            return torch.ops.aten.alias.default(args[0])
        if step.target is torch.ops.aten.batch_norm.default:
            x, weight, bias, mean, variance, training, *_ = args
            if training:  # it only writes to running statistics
                return step.target(x, weight, bias, None, None, *args[5:], **kwargs)
            return _normalized(x, weight, bias, mean, variance, args[7])
        try:
            return super().differentiable(step, args, kwargs)
        except RuntimeError as error:
            if _UNDIFFERENTIABLE not in str(error):
                raise
        return _by_parts(step.target, args, kwargs)


def _by_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op by its decomposition, whose parts have the gradients that it lacks.

    Without one, an input that autograd refuses decides rather than computes, and passes no gradient.
    """
    if op in decomposition_table:  # on copies, since running statistics are written to
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return decomposition_table[op](*args, **kwargs)
    given, structure = pytree.tree_flatten((args, kwargs))
    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in given]
    for index, value in enumerate(given):
        alone = [*detached[:index], value, *detached[index + 1 :]]
        some, named = pytree.tree_unflatten(alone, structure)
        try:
            op(*some, **named)
        except RuntimeError:
            given[index] = detached[index]
    args, kwargs = pytree.tree_unflatten(given, structure)
    return op(*args, **kwargs)


def _normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return a batch norm with running statistics, which autograd does not differentiate by those."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    made = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + eps)
    made = made if weight is None else made * weight.view(shape)
    return made if bias is None else made + bias.view(shape)


@dataclass(slots=True)
class Sensitivities:
    """Squared error of outputs, relative to their squares, by what is rounded.

    Attributes:
        columns: what each number of a row is about: outputs of a batch.
        own: by value, what its own rounding adds where it is in 16 bits.
        reads: by value and reader, what casting a float32 value for a reader in 16 bits adds.
        backward: by value, what its op's backward adds, by rounding or because its derivative jumps.
    """

    columns: list[str] = field(default_factory=list)
    own: dict[str, Row] = field(default_factory=dict)
    reads: dict[tuple[str, str], Row] = field(default_factory=dict)
    backward: dict[tuple[str, BackwardKind], Row] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Iterable[ProbedColumn]) -> Sensitivities:
        """Return the table of what was probed."""
        made = cls()
        for column in columns:
            made.add(column)
        return made

    def add(self, column: ProbedColumn) -> None:
        """Add a column; what it lacks, and what others lack, adds nothing there."""
        at = len(self.columns)
        self.columns.append(column.name)
        _extend(self.own, column.own, at)
        _extend(self.reads, {(made, reader): energy for made, reader, energy in column.reads}, at)
        _extend(self.backward, {(made, kind): energy for made, kind, energy in column.backward}, at)

    def predicted(self, wide: Collection[str]) -> Row:
        """Return the relative squared error of each column with these values in float32.

        Errors of gradients are those of the run, whatever is in float32.
        """
        total = sum(self.backward.values(), np.zeros(len(self.columns)))
        for name, row in self.own.items():
            if name not in wide:
                total += row
        for (made, reader), row in self.reads.items():
            if made in wide and reader not in wide:
                total += row
        return total


def _extend(rows: dict[Key, Row], found: Mapping[Key, float], at: int) -> None:
    """Append a number to each row."""
    for key in dict.fromkeys((*rows, *found)):
        rows[key] = np.append(rows.get(key, np.zeros(at)), found.get(key, 0.0))


class ErrorCollector(GradientObserver):
    """Adds up (g e)^2 by value and by reader, on the device."""

    def __init__(self, names: ValueNames, tape: ErrorTape, dtype: torch.dtype) -> None:
        self._names = names
        self._tape = tape
        self._dtype = dtype
        self._given = tape.references
        self.own: dict[str, torch.Tensor] = {}
        self.reads: dict[tuple[str, str], torch.Tensor] = {}
        self.backward: dict[tuple[str, BackwardKind], torch.Tensor] = {}

    def made(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Add what rounding a value for one reader costs."""
        names = self._names
        if step.node in names.made and of in names.of:
            reader = names.graph.values[names.of[step.node]]
            if reader.kind is ValueKind.OP or reader.converts:
                self._add(self.reads, (names.of[of], reader.name), pair[0], self._rounding(of))
        return pair[1]

    def complete(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Add what the rounding of a value, or of an item of several, costs."""
        names = self._names
        if node in names.made or (node in names.of and node.target is operator.getitem):
            self._add(self.own, self._names.of[node], pair[0], self._own_error(node))
        return pair[1]

    def decide(self, node: fx.Node, gradient: torch.Tensor) -> None:
        """Add what rounding a value for the decisions that are made on it costs; they pass no gradient."""
        names = self._names
        for user in node.users:
            is_op = user in names.made and names.graph.values[names.of[user]].kind is ValueKind.OP
            if is_op and float_value(user.meta.get("val")) is None:
                self._add(self.reads, (names.of[node], names.of[user]), gradient, self._rounding(node))

    def backward_made(
        self, node: fx.Node, kind: BackwardKind, effect: torch.Tensor, error: torch.Tensor
    ) -> None:
        """Add what the error of a gradient that the node's op computes costs."""
        if node in self._names.of:
            # a jump moves a gradient from one place to another: its places in a row err together
            self._add(self.backward, (self._names.of[node], kind), effect, error, by_row=kind == "jump")

    def fetched(self) -> Collected:
        """Return everything as numbers, fetched from the device at once."""
        tables: tuple[dict[Any, torch.Tensor], ...] = (self.own, self.reads, self.backward)
        every = [energy for table in tables for energy in table.values()]
        numbers = iter(
            torch.stack([energy.to(every[0].device) for energy in every]).tolist() if every else []
        )
        own, reads, backward = ({key: next(numbers) for key in table} for table in tables)
        return Collected(own, reads, backward)

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
        reference = self._given.get(node)
        if not isinstance(reference, torch.Tensor):
            return None
        return finite_difference(rounded(reference.detach(), self._dtype), widened_tensor(reference.detach()))

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

    With ``decisions``, these are values on which the outputs are decided.

    Raises:
        RunFailed: an op has no gradient.
    """
    collector = ErrorCollector(names, tape, dtype)
    customs = CustomBackwards(executor.program, Emulated(), executor.device)
    dtypes, backend = _float32_dtypes(executor.program), DifferentiableBackend()
    backward = BackwardPass(tape, tape.needed, dtypes, backend, customs, backend)
    try:
        backward.run({node: (gradient, gradient) for node, gradient in seed.items()}, collector)
    except (RuntimeError, NotImplementedError) as error:
        raise RunFailed(f"an op of the model has no gradient: {first_line(error)}") from error
    if decisions:
        for node, gradient in seed.items():
            collector.decide(node, gradient)
    return collector.fetched()


def _float32_dtypes(program: Program) -> dict[fx.Node, tuple[torch.dtype | None, ...]]:
    found: dict[fx.Node, tuple[torch.dtype | None, ...]] = dict.fromkeys(program.inputs, (torch.float32,))
    found.update(
        {
            step.node: tuple(WIDE.get(d, d) if d is not None else None for d in step.dtypes)
            for step in program.steps
        }
    )
    return found


class ErrorTape(Tape):
    """Records FP32's values for backward passes, and the rounding error that each op adds in 16 bits.

    Attributes:
        errors: by node, the op's result in 16 bits minus its result in FP32 on the same inputs; a list for an
            op with several results.
    """

    def __init__(self, observer: Observer, needed: frozenset[fx.Node]) -> None:
        super().__init__(observer, needed)
        self.needed = needed
        self.errors: dict[fx.Node, Any] = {}
        self._exact = Float32Backend()

    @property
    def references(self) -> dict[fx.Node, Any]:
        """FP32's values of all nodes that some step reads."""
        return {node: pair[0] for entry in self.steps for node, pair in entry.inputs.items()}

    @property
    def elements(self) -> int:
        """How many numbers a backward pass over the tape computes gradients of, at least 1."""
        return sum(v.numel() for v in self.references.values() if isinstance(v, torch.Tensor)) or 1

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Record the step with FP32's inputs only, and the error of its result."""
        result = self._observer.observe(step, reference, value, call)
        if is_mark(step.target) or step.node in self.needed or step.decides:
            inputs = {node: (pair[0], pair[0]) for node, pair in call.inputs.items()}
            self.steps.append(TapeEntry(step, inputs, True, call.state))
            if is_mark(step.target):
                self.marks.append(self.steps[-1])
        if step.low_precision and step.makes_values and not call.shared and not step.mutates:
            self.errors[step.node] = self._error(step, result, call)
        return result

    def _error(self, step: Step, value: Any, call: StepCall) -> Any:
        inputs = {n: (widened_value(p[1]), None) for n, p in call.inputs.items()}
        args, kwargs = self._exact.arguments(step)
        if call.state is not None:
            device = next((p[0].device for p in inputs.values() if isinstance(p[0], torch.Tensor)), None)
            restore_random_state(call.state, device or torch.device("cpu"))
        exact = self._exact.call(step, resolved(args, inputs, 0), resolved(kwargs, inputs, 0))
        if isinstance(exact, torch.Tensor):
            return finite_difference(value, exact)
        return [
            finite_difference(v, x) if isinstance(x, torch.Tensor) else None
            for v, x in zip(value, exact, strict=True)
        ]


def finite_difference(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error of finite elements; what overflows is not a matter of rounding."""
    if value.shape != exact.shape or not (exact.is_floating_point() or exact.is_complex()):
        return torch.zeros_like(exact)
    return torch.nan_to_num(widened_tensor(value) - exact, 0.0, 0.0, 0.0)


def float_nodes(program: Program) -> frozenset[fx.Node]:
    """Return the nodes that a gradient may be for: all that hold floating-point values."""
    found = {node for node in program.inputs if float_value(node.meta.get("val")) is not None}
    for step in program.steps:
        if any(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in step.dtypes):
            found.add(step.node)
    return frozenset(found)
