"""Measures every floating-point value of a run without changing it.

Calling every op a third time in full would cost a third forward pass, so a large op is called on a few rows
of its input, whose results are the same as in the full call. Ops without such a cut are called in full if
their output is small, and have no local error otherwise.

Decisions are ops such as topk, sort, argmax, comparisons, rounding, bucketize and casts to integers. While a
model runs, differing choices are only counted; ``DecisionDetail`` measures the margins of one op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from ampaudit.core.formats import NumberFormat
from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId
from ampaudit.findings.finding import Gap, GapKind
from ampaudit.run.backends import Backend, rows_of_norm
from ampaudit.run.lockstep import Observer, StepCall
from ampaudit.run.low_precision import multiplies
from ampaudit.run.measure import (
    ERROR_EVERY,
    FIELDS,
    Samples,
    SampleStatistics,
    fetch,
    flat_pair,
    measure_cpu,
    measure_on_device,
)
from ampaudit.run.program import Step
from ampaudit.trace.flatten import VALUE_READ, mark_number
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Role
from ampaudit.trace.opnames import base_name, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES, components, node_dtype

FULL_CALL = 1 << 13  # output elements up to which any op is called again in full
_ROWS = 8

Index = tuple[slice, ...]
# Maps argument values and output to an index for each argument to cut, and one for the output.
Cut = Callable[[tuple[Any, ...], torch.Tensor], tuple[dict[int, Index], Index] | None]
# attributes of a meter that hold measurements
_MEASURED = (
    *("samples", "path", "gaps", "_updated", "_rows"),
    *("_local_rows", "_inside_rows", "_choices", "_chosen"),
)


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """The measurements of one site in one batch."""

    site: SiteId
    fields: dict[str, float]
    elements: int
    updated: int | None = None  # position of a written argument that is not the result

    @property
    def bad(self) -> bool:
        """Whether an element is inf or NaN in 16 bits only."""
        return self.fields["pos_inf"] + self.fields["neg_inf"] + self.fields["nan"] > 0


class Meter(Observer):
    """Measures pairs of values. On a GPU, measurements stay on the device until ``results``."""

    deferred = False  # whether measurements are deferred to ``results`` even on a CPU

    def __init__(self, number_format: NumberFormat, backend: Backend, local: bool) -> None:
        self.samples = Samples(number_format.min_normal)
        self.path = PathValues()
        self._near = number_format.max / 2
        self.gaps: set[Gap] = set()
        self._backend = backend
        self.local = local
        self._updated: dict[int, int] = {}  # positions of written arguments, by the number of a row
        self._rows: list[tuple[SiteId, list[float] | torch.Tensor, int]] = []
        self._local_rows: list[tuple[SiteId, torch.Tensor, int]] = []
        self._inside_rows: list[tuple[SiteId, torch.Tensor]] = []
        self._choices: list[tuple[SiteId, torch.Tensor, int]] = []
        self._chosen: list[tuple[str, torch.Tensor]] = []  # choices in stacks of matrices, by name

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Measure a step's outputs."""
        self._note_gaps(step)
        self.path.observe(step, reference, call)
        if step.decides and step.site is not None and not call.computed_once:
            counted = differing_choices(reference, value)
            if counted is not None:
                self._choices.append((step.site.id, *counted))
        if step.choice is not None:
            self._chosen.append(
                (step.choice.parameter, step.choice.chosen(call.inputs[step.choice.index][1]))
            )
        if step.site is None or not step.observed:
            return value
        bad = False
        for first, second in float_outputs(reference, value):
            bad |= self._measure_pair(step, first, second)
        for (position, first, second), (_, dtype) in zip(call.updates(step), step.updates, strict=True):
            # float32 statistics beside a 16-bit result never reach the end of the format
            alike = dtype is step.site.dtype or dtype in LOW_PRECISION_DTYPES
            if second.is_floating_point() and alike:
                self._updated[len(self._rows)] = position
                bad |= self._measure_pair(step, first, second)
        if self.local and (peak := inside_peak(step, call.ref_args, self._near * 2)) is not None:
            self._inside_rows.append((step.site.id, peak))
        if self.local and step.low_precision and not call.computed_once and not bad:
            error = local_error(step, self._backend, call, reference)
            if error is not None:
                self._local_rows.append((step.site.id, *error))
        return value

    def _measure_pair(self, step: Step, reference: torch.Tensor, value: torch.Tensor) -> bool:
        """Measure one output; on the CPU, return whether it is inf or NaN in 16 bits only."""
        assert step.site is not None
        if reference.shape != value.shape:
            self._note_gap(
                step, GapKind.SHAPE, "its shape depends on values and differs between FP32 and 16 bits"
            )
            return False
        if value.numel() == 0:
            self._rows.append((step.site.id, [0.0] * len(FIELDS), 0))
            return False
        first, second = flat_pair(reference, value)
        self.samples.add(step.site.id, first, second)
        if self.deferred or value.device.type != "cpu":
            self._rows.append((step.site.id, measure_on_device(first, second), second.numel()))
            return False
        second = second.to(first.dtype)
        if step.site.role is Role.WEIGHT_CAST:
            fields = measure_cpu(first, first)
            if not fields[0] < self._near:  # the rounding error of weights within range is not computed
                fields = measure_cpu(first, second, self._near)
        else:
            sampled = step.low_precision and step.site.role is Role.COMPUTE
            fields = measure_cpu(first, second, self._near, ERROR_EVERY if sampled else 1)
        self._rows.append((step.site.id, fields, second.numel()))
        return fields[2] + fields[3] + fields[4] > 0

    def choices(self) -> Iterator[tuple[SiteId, int, int]]:
        """Yield for each decision the number of choices, and of those that differ between the runs."""
        differing = fetch(row for _, row, _ in self._choices)
        for (site, _, elements), count in zip(self._choices, differing, strict=True):
            yield site, elements, int(count)

    def chosen(self) -> Iterator[tuple[str, set[int]]]:
        """Yield for each stack of matrices the indices that a tensor selected."""
        if not self._chosen:
            return
        flags = iter(torch.cat([used for _, used in self._chosen]).tolist())
        for name, used in self._chosen:
            yield name, {number for number, flag in enumerate(islice(flags, len(used))) if flag}

    def _note_gap(self, step: Step, kind: GapKind, reason: str) -> None:
        if step.site is not None:
            self.gaps.add(Gap(step.site.id, kind, step.site.op, reason))

    def _note_gaps(self, step: Step) -> None:
        op = overload_of(step.target)
        if op is not None and step.low_precision and multiplies(op, step.args, step.kwargs):
            reason = "16 bits round after each factor; here the product is rounded once"
            self._note_gap(step, GapKind.PRODUCT, reason)
        if isinstance(step.target, HigherOrderOperator):
            reason = "control flow: only its outputs are checked, not its branches"
            self._note_gap(step, GapKind.CONTROL_FLOW, reason)

    def state(self) -> dict[str, Any]:
        """Return all measurements, for another process to continue with."""
        self.samples.flush()
        return {name: getattr(self, name) for name in _MEASURED}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the measurements of another process."""
        vars(self).update({name: state[name] for name in _MEASURED})

    def results(self) -> Iterator[MeasuredValue]:
        """Yield all measurements since the start, fetched from the device at once."""
        self.samples.flush()
        waiting = iter(fetch(row for _, row, _ in self._rows if isinstance(row, torch.Tensor)))
        for index, (site, row, elements) in enumerate(self._rows):
            numbers = next(waiting) if isinstance(row, torch.Tensor) else row
            yield MeasuredValue(
                site, dict(zip(FIELDS, numbers, strict=True)), elements, self._updated.get(index)
            )

    def inside_results(self) -> Iterator[tuple[SiteId, float]]:
        """Yield the largest square inside each norm with 16-bit input."""
        peaks = fetch(peak for _, peak in self._inside_rows)
        yield from zip((site for site, _ in self._inside_rows), peaks, strict=True)

    def local_results(self) -> Iterator[tuple[SiteId, float, float, int]]:
        """Yield sums of squared local errors and references, and the number of elements."""
        numbers = fetch(row for _, row, _ in self._local_rows)
        for (site, _, elements), (error, signal) in zip(self._local_rows, numbers, strict=True):
            if math.isfinite(error) and math.isfinite(signal):
                yield site, error, signal, elements


def float_outputs(reference: Any, value: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of real tensors among an op's outputs; complex ones as their components."""
    single = not isinstance(value, list | tuple)
    pairs = zip((reference,), (value,)) if single else zip(reference, value)  # noqa: B905
    for first, second in pairs:
        if isinstance(second, torch.Tensor) and (second.is_floating_point() or second.is_complex()):
            yield components(first), components(second)


def local_error(
    step: Step, backend: Backend, call: StepCall, reference: Any
) -> tuple[torch.Tensor, int] | None:
    """Return ``(stack(sum err^2, sum ref^2), elements)``, or ``None`` if the op cannot be called again."""
    if not isinstance(reference, torch.Tensor) or step.random or step.mutates or step.site is None:
        return None
    if step.site.role is not Role.COMPUTE:
        return None
    cuts: dict[int, Index] = {}
    expected = reference
    if reference.numel() > FULL_CALL:
        find = _CUTS.get(step.site.op)
        plan = find(call.ref_args, reference) if find else None
        if plan is None:
            return None
        cuts, out = plan
        expected = reference[out]
    result = backend.call(step, *_clean_arguments(step, backend, call, cuts))
    if not isinstance(result, torch.Tensor):
        return None
    # a convolution of the top rows also returns rows computed from padding instead of the rows below
    result = result[tuple(slice(0, size) for size in expected.shape)]
    if result.shape != expected.shape:
        return None
    # infinities make the sums infinite; such rows are left out when the numbers are fetched
    signal = components(expected).reshape(-1)
    error = components(result).to(signal.dtype).reshape(-1) - signal
    return torch.stack([torch.dot(error, error), torch.dot(signal, signal)]), expected.numel()


def _clean_arguments(
    step: Step, backend: Backend, call: StepCall, cuts: dict[int, Index]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments without accumulated error: FP32's, rounded unless they are weights or inputs."""

    def clean(node: fx.Node, index: Index | None = None) -> Any:
        reference, value = call.inputs[node]
        if not isinstance(value, torch.Tensor):
            return reference
        is_cast = node.target is torch.ops.aten.to.dtype
        source = node.all_input_nodes[0] if is_cast else node
        if source.op == "placeholder" or reference is value:  # it is the rounded reference already
            return value if index is None else value[index]
        reference = reference if index is None else reference[index]
        return backend.represent(reference, node_dtype(node))

    args, kwargs = backend.arguments(step)
    cleaned = tuple(
        clean(arg, cuts.get(i)) if isinstance(arg, fx.Node) else fx.node.map_arg(arg, clean)
        for i, arg in enumerate(args)
    )
    return cleaned, fx.node.map_arg(kwargs, clean)


def _rows(shape: tuple[int, ...]) -> Index:
    """Index the first element of leading dimensions, eight rows, and all of the last dimension."""
    leading = [slice(0, 1)] * max(len(shape) - 2, 0)
    return (*leading, slice(0, _ROWS), slice(None)) if len(shape) > 1 else (slice(None),)


def _broadcast(shape: tuple[int, ...], out: Index) -> Index:
    """Index the part of a broadcast operand that belongs to the sampled output."""
    aligned = out[len(out) - len(shape) :]
    return tuple(slice(None) if size == 1 else part for size, part in zip(shape, aligned, strict=True))


def _elementwise(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    index = _rows(tuple(out.shape))
    tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    if out.ndim < 2 or any(a.ndim > out.ndim for a in tensors.values()):
        return None
    return {i: _broadcast(tuple(a.shape), index) for i, a in tensors.items() if a.ndim}, index


def _last_dimension(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample rows of linear, norms and softmax over the last dimension, which are independent."""
    if out.ndim < 2:
        return None
    over = args[1] if len(args) > 1 else None
    if isinstance(over, int) and over not in (-1, out.ndim - 1):
        return None
    if isinstance(over, list | tuple) and len(over) != 1:
        return None
    return {0: _rows(tuple(out.shape))}, _rows(tuple(out.shape))


def _matmul(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    first, second = args[0], args[1]
    if first.ndim < 2 or second.ndim < 2 or out.ndim < 2:
        return None
    index = _rows(tuple(out.shape))
    rows = _broadcast(tuple(first.shape[:-1]), index[:-1])
    batch = _broadcast(tuple(second.shape[:-2]), index[:-2])
    return {0: (*rows, slice(None)), 1: (*batch, slice(None), slice(None))}, index


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample one image, eight output channels, and the top row, which does not read the lower padding."""
    x, weight = args[0], args[1]
    if (len(args) > 6 and args[6] != 1) or x.ndim != out.ndim or out.ndim < 3:
        return None
    stride, padding, dilation = (_first(args, place, default) for place, default in ((3, 1), (4, 0), (5, 1)))
    if not isinstance(padding, int):
        return None
    reach = dilation * (weight.shape[2] - 1) + 1
    rows_in = min(x.shape[2], max(reach - padding, 1))
    rows_out = (rows_in + padding - reach) // stride + 1
    channels = slice(0, 8)
    cuts: dict[int, Index] = {0: (slice(0, 1), slice(None), slice(0, rows_in)), 1: (channels,)}
    if len(args) > 2 and isinstance(args[2], torch.Tensor):
        cuts[2] = (channels,)
    return (cuts, (slice(0, 1), channels, slice(0, rows_out))) if rows_out > 0 else None


def _first(args: tuple[Any, ...], place: int, default: int) -> Any:
    value = args[place] if len(args) > place else default
    return value[0] if isinstance(value, list | tuple) else value


def _attention(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample one head of one sequence."""
    if out.ndim != 4:
        return None
    one: Index = (slice(0, 1), slice(0, 1))
    cuts = dict.fromkeys(range(3), one)
    if len(args) > 3 and isinstance(args[3], torch.Tensor):
        if args[3].ndim != 4:
            return None
        cuts[3] = one
    return cuts, one


def _eval_norm(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample one row of one image from a batch norm with running statistics."""
    if out.ndim < 3 or args[5] is True:
        return None
    index = (slice(0, 1), slice(None), slice(0, 1))
    return {0: index}, index


_ELEMENTWISE_OPS = """
    abs add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Scalar add.Scalar sub.Scalar mul.Scalar
    div.Scalar neg reciprocal sqrt rsqrt square pow.Tensor_Scalar pow.Tensor_Tensor exp exp2 expm1 log
    log2 log10 log1p sigmoid tanh sin cos erf relu relu6 gelu silu mish elu selu celu leaky_relu
    hardswish hardsigmoid softplus log_sigmoid clamp clamp_min clamp_max maximum minimum where.self
""".split()
_CUTS: dict[str, Cut] = {
    **{f"aten.{name}" if "." in name else f"aten.{name}.default": _elementwise for name in _ELEMENTWISE_OPS},
    "aten.linear.default": _last_dimension,
    "aten.layer_norm.default": _last_dimension,
    "aten.rms_norm.default": _last_dimension,
    "aten.softmax.int": _last_dimension,
    "aten.log_softmax.int": _last_dimension,
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.batch_norm.default": _eval_norm,
}


_CENTRED = frozenset("layer_norm group_norm batch_norm var std var_mean std_mean".split())
_SQUARING = _CENTRED | {"rms_norm", "linalg_vector_norm", "norm", "cosine_similarity", "frobenius_norm"}


def inside_peak(step: Step, ref_args: tuple[Any, ...], limit: float) -> torch.Tensor | None:
    """Return the peak of (x - mean)^2 or x^2 over an op's reference input, as a scalar on its device.

    ``None`` if the op does not square, has no 16-bit input, or, on a CPU, if its input is too small for a
    square to exceed ``limit``.
    """
    if not isinstance(step.target, OpOverload):
        return None
    base = base_name(step.target)
    dtypes = [node_dtype(n) for n in step.node.all_input_nodes[:1]]
    if base not in _SQUARING or not any(dtype in LOW_PRECISION_DTYPES for dtype in (*dtypes, *step.dtypes)):
        return None
    if not ref_args or not isinstance(ref_args[0], torch.Tensor):
        return None
    x = ref_args[0].float()
    arguments = named_arguments(step.target, ref_args, dict(step.kwargs))
    if not x.numel() or not arguments.get("training", True):  # a batch norm with running statistics
        return None
    if x.device.type == "cpu":
        low, high = torch.aminmax(x)
        if max(high - low, high, -low).item() ** 2 < limit:
            return None
    if base in _CENTRED:
        x, axes = rows_of_norm(x, arguments)
        x = x - x.mean(axes, keepdim=True)
    return x.abs().amax().square()


class PathValues:
    """Collects the values that the model's code reads during one run, on their device."""

    def __init__(self) -> None:
        self._read: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        # sites whose result differs in size in 16 bits, with that size
        self.resized: list[tuple[SiteId, str]] = []

    def observe(self, step: Step, reference: Any, call: StepCall) -> None:
        """Keep the values of a read, and the sizes that choices decide."""
        if call.resized is not None and step.site is not None:
            self.resized.append((step.site.id, call.resized))
        if step.target is VALUE_READ:
            ((reference, value),) = call.inputs.values()
            copied = reference.detach().clone()
            low = copied if value is reference else value.detach().clone()
            self._read.append((mark_number(step.node), copied, low))

    def results(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return both values of each read by its number, fetched from the device together."""
        numbers = [number for number, _, _ in self._read]
        fp32 = _fetched([reference for _, reference, _ in self._read])
        low = _fetched([value for _, _, value in self._read])
        return dict(zip(numbers, zip(fp32, low, strict=True), strict=True))


# the classes that occur in the state of a meter
MEASUREMENTS = (Samples, SampleStatistics, PathValues, Gap, GapKind)


def _fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU, with one transfer per dtype."""
    by_index: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        group = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for _, tensor in group]).cpu()
        parts = flat.split([tensor.numel() for _, tensor in group])
        by_index |= {i: part.reshape(tensor.shape) for (i, tensor), part in zip(group, parts, strict=True)}
    return [by_index[i] for i in range(len(tensors))]


@dataclass(slots=True)
class DecisionStats:
    """The choices of one site over all batches."""

    elements: int = 0  # number of choices
    differing: int = 0  # number of choices that differ between FP32 and 16 bits

    def add(self, elements: int, differing: int) -> None:
        """Add one batch."""
        self.elements += elements
        self.differing += differing


def differing_choices(reference: Any, value: Any) -> tuple[torch.Tensor, int] | None:
    """Return the number of differing choices (on their device) and of all; ``None`` if the shapes differ."""
    choices = _choices(reference, value)
    return None if choices is None else (_flipped(*choices).sum(), choices[0].numel())


def _choices(reference: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the choices of both runs, if they can be compared."""
    first, second = _choice(reference), _choice(value)
    if first is None or second is None or first.shape != second.shape:
        return None
    return first, second


def _flipped(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a mask of differing choices; round, floor and sign return whole numbers as floats."""
    return (first - second).abs() >= 0.5 if first.is_floating_point() else first != second


def _choice(value: Any) -> torch.Tensor | None:
    """Return the integer or boolean output of an op, or its single output."""
    if isinstance(value, torch.Tensor):
        return value
    tensors = [item for item in value if isinstance(item, torch.Tensor)] if value is not None else []
    return next((t for t in tensors if not t.is_floating_point()), None)


def with_fp32_choices(step: Step, reference: Any, value: Any, call: StepCall) -> Any:
    """Return a decision's result with FP32's choices, and the 16-bit run's values if there are any."""
    if isinstance(value, torch.Tensor):
        return reference
    scores, axis = call.args[0], _axis(step, call)
    choice = _choice(reference)
    results = []
    for first, second in zip(reference, value, strict=True):
        scored = isinstance(second, torch.Tensor) and second.is_floating_point()
        if scored and axis is not None and choice is not None and scores.ndim == choice.ndim:
            results.append(torch.gather(scores, axis, choice))
        else:
            results.append(first)
    return type(value)(results)


def _axis(step: Step, call: StepCall) -> int | None:
    """Return the axis along which a decision chooses; ``None`` for the whole tensor."""
    target = overload_of(step.target)
    if target is None:
        return None
    arguments = named_arguments(target, call.args, call.kwargs)
    default = None if base_name(target) in ("max", "min", "argmax", "argmin") else -1
    axis = arguments.get("dim", default)
    return axis if isinstance(axis, int) else None


@dataclass(slots=True)
class DecisionDetail:
    """Measures the margins of one decision."""

    node: str  # name of the node
    differing: int = 0  # number of choices that differ
    elements: int = 0  # number of choices
    ties: int = 0  # number of differing choices whose candidates are equal in 16 bits
    margin: float | None = None  # median distance in FP32 between the two candidates of a differing choice
    # median error of the input, for decisions without candidates (rounding, casts, buckets)
    error: float | None = None
    magnitude: float | None = None  # median magnitude of the candidates

    def inspect(self, step: Step, reference: Any, value: Any, call: StepCall) -> None:
        """Measure the margins of the node's choices."""
        choices = _choices(reference, value)
        if choices is None:
            return
        first, second = choices
        self.elements = first.numel()
        flipped = _flipped(first, second)
        self.differing = int(flipped.sum())
        pairs = _candidates(step, first, second, call)
        if pairs is None or not self.differing:
            return
        (ours, theirs), (ours16, theirs16) = pairs
        if flipped.numel() != ours.numel():  # the choices do not correspond to candidates
            return
        flat = flipped.reshape(ours.shape)
        distance = (ours - theirs).abs()[flat].double()
        if ours16 is None:
            self.error = float(distance.median())
        else:
            self.margin = float(distance.median())
        self.magnitude = float(ours.abs()[flat].double().median())
        if ours16 is not None and theirs16 is not None:
            self.ties = int((ours16 == theirs16)[flat].sum())


Pair = tuple[torch.Tensor, torch.Tensor]


def _candidates(
    step: Step, first: torch.Tensor, second: torch.Tensor, call: StepCall
) -> tuple[Pair, tuple[torch.Tensor | None, torch.Tensor | None]] | None:
    """Return the competing values of each choice, in FP32 and in 16 bits."""
    target = overload_of(step.target)
    name = base_name(target).rstrip("_") if isinstance(target, OpOverload) else ""
    scores, scores16 = call.ref_args[0], call.args[0]
    if not isinstance(scores, torch.Tensor):
        return None
    if name in having("compares"):
        other, other16 = call.ref_args[1], call.args[1]
        ours, theirs = torch.broadcast_tensors(scores, torch.as_tensor(other, device=scores.device))
        near, far = torch.broadcast_tensors(scores16, torch.as_tensor(other16, device=scores.device))
        return (ours, theirs), (near, far)
    if name in having("orders", "index_of_extreme") and not first.is_floating_point():
        axis = _axis(step, call)
        if axis is None:
            scores, scores16, axis = scores.reshape(-1), scores16.reshape(-1), 0
        if first.ndim < scores.ndim or first.ndim == 0:
            first, second = first.unsqueeze(axis), second.unsqueeze(axis)
        if first.ndim != scores.ndim:
            return None
        values = [torch.gather(s, axis, i) for s in (scores, scores16) for i in (first, second)]
        return (values[0], values[1]), (values[2], values[3])
    if scores.shape == first.shape:
        return (scores, scores16.to(scores.dtype)), (None, None)
    return None


def spacing(magnitude: float, fraction_bits: int) -> float:
    """Return the distance between neighbors of a format at a magnitude."""
    return 2.0 ** (math.floor(math.log2(magnitude)) - fraction_bits) if magnitude > 0.0 else 0.0
