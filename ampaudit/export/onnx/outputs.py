"""Runs a written ONNX file in lock-step, and compares its outputs with the original's.

A box, a label or a token is either the same one as before or another one. The difference between the
coordinates or scores of two boxes says nothing about the accuracy of a conversion.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from ampaudit.core.errors import RunFailed
from ampaudit.core.formats import low_precision_format
from ampaudit.core.untrusted import describe
from ampaudit.export.config import ConvertConfig
from ampaudit.export.onnx.types import CHOOSING, COMPARING, is_float32, on_last_axis
from ampaudit.export.onnx.write import ONNX_FLOATS
from ampaudit.export.program import compare_output, digest_of_tensors
from ampaudit.policy.load import load_policy
from ampaudit.policy.schema import AS_IS
from ampaudit.report.conversion import OutputRecord
from ampaudit.run.config import RunConfig
from ampaudit.run.device import pick_device
from ampaudit.run.lockstep import LockStep, Observer
from ampaudit.run.record import RunRecord
from ampaudit.run.runner import ExecutorCache
from ampaudit.source import Batch
from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.source.onnx.names import bodies_of
from ampaudit.source.onnx.source import GraphInput, batch_of, by_name, inputs_of, is_sum, size_of
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.isolation import call_unchanged
from ampaudit.trace.values import dtype_name

_MAX_ELEMENTS = 1 << 22  # of each generated input
_LARGER = 3  # factor for the size of each open axis, except the batch
_LONGER = 8  # factor for integers, except indices into a table of known size
_NEAR_ZERO = 2.0**-7  # spacing of bfloat16 at 1
Tensors = Mapping[str, torch.Tensor]


class Original:
    """A batch with the outputs of the original model.

    If the model has 16-bit weights, its ``reference`` computes them in float32.
    """

    def __init__(self, model: OnnxModel, batch: Batch, seed: int, reference: OnnxRun | None) -> None:
        self.batch = batch
        self.reference = reference
        self._model = model
        self._seed = seed

    @cached_property
    def exact(self) -> Tensors:
        """The outputs of the original in float32 by name."""
        batch = self.batch
        outputs = _tensors(call_unchanged(self._model, batch.args, batch.kwargs, seed=self._seed))
        return outputs if self.reference is None else self.reference.outputs(batch, outputs, reference=True)


class OnnxRun:
    """Runs one model in lock-step, and compares its 16-bit outputs with those of the original."""

    def __init__(self, model: OnnxModel, config: ConvertConfig) -> None:
        self._model = model
        self._seed = config.seed
        where, form = pick_device(config.device, audits=True), low_precision_format(config.dtype)
        run_config = RunConfig(load_policy(AS_IS), load_policy("torch-cuda"), form, where, config.seed)
        self._executors = ExecutorCache(self._model, run_config, RunRecord(where.type, "emulated"))

    def records(self, ours: Tensors, exact: Tensors) -> list[OutputRecord]:
        """Compare each output with that of the original."""
        pairs = comparable_outputs(ours, exact, orderings(self._model.file.model))
        records = []
        for name, pair in pairs.items():
            dtype, digest = dtype_name(ours[name].dtype), digest_of_tensors([ours[name]])
            records.append(OutputRecord(name, dtype, digest, *compare_output(*pair)))
        return records

    def outputs(
        self, batch: Batch, expected: Tensors, number: int = 0, *, reference: bool = False
    ) -> Tensors:
        """Return the outputs of the 16-bit run, or of the reference, under the names of ``expected``."""
        batch = _with_input_types(batch, self._model)
        executor = self._executors.get(batch, number)
        one_side = LockStep(
            executor.program,
            executor.placed,
            executor.backend,
            executor.device,
            reference_only=reference,
            converted_only=not reference,
        )
        pairs = one_side.run(tensor_leaves(batch.args, batch.kwargs), Observer())
        ours = {
            name.removeprefix("output."): pair[0 if reference else 1]
            for name, pair in zip(executor.program.traced.outputs, pairs, strict=True)
        }
        if len(ours) < len(expected):  # a trace lists a tensor once, even if several outputs return it
            again = _tensors(call_unchanged(self._model, batch.args, batch.kwargs, seed=self._seed))
            listed = {id(again[name]): value for name, value in ours.items()}
            ours = {name: listed[id(tensor)] for name, tensor in again.items()}
        return ours


def _tensors(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among outputs; elements of a sequence are named as in a trace."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            tensors |= {f"{name}[{number}]": each for number, each in enumerate(value)}
        elif value is not None:
            tensors[name] = value
    return tensors


def _with_input_types(batch: Batch, model: OnnxModel) -> Batch:
    """Cast the floats of a batch to the input types of the written file."""
    kinds = {str(value.name): value.dtype for value in model.inputs}
    inputs = by_name(batch, [*kinds])
    low = {
        n: torch_dtype_of(kind) for n, kind in kinds.items() if kind is not None and kind.name in ONNX_FLOATS
    }
    cast = {name: t.to(low[name]) if name in low else t for name, t in inputs.items()}
    return batch_of(inputs_of(model.inputs), cast)


def refuse_broken(
    records: Iterable[OutputRecord], ours: Tensors, original: Original, config: ConvertConfig
) -> None:
    """Reject a file that computes inf or NaN, or another shape, where the original's outputs are finite.

    Raises:
        RunFailed: An output is broken.
    """
    for record in records:
        values, exact = ours[record.name], original.exact[record.name]
        if breaks(values, exact) or (record.max_error is None and values.shape != exact.shape):
            hint = "scan the model with --advise, and pass a policy that keeps more in float32"
            if original.reference is not None:
                hint = "nodes in 16 bits are not changed: convert the float32 model instead"
            elif config.io != "float32" and exact.to(getattr(torch, config.dtype)).isinf().any():
                hint = f"its values reach {float(exact.abs().amax()):.4g}: --io float32"
            raise RunFailed(f"the written file computes {_fault(record)}", hint=hint)


def describe_inaccurate(
    records: Iterable[OutputRecord], min_sqnr: float, of_integers: float = -math.inf
) -> str:
    """Describe the outputs that are less accurate than required, in dB; empty if there are none."""
    return ", ".join(
        _fault(record)
        for record in records
        if _decibels(record) < (min_sqnr if record.is_float else max(min_sqnr, of_integers))
    )


def _fault(record: OutputRecord) -> str:
    name = describe(record.name)
    if record.max_error is None:
        return f"{name} as inf or NaN" if record.is_float else f"{name} in another shape"
    if record.differing is not None:
        return f"{name} with {100 * record.differing:.2g} % of its integers changed"
    if record.sqnr_db is None:
        return f"{name} as {record.max_error:.2g}, where the original is zero"
    return f"{name} with {record.sqnr_db:.0f} dB against FP32"


def _decibels(record: OutputRecord) -> float:
    """Return the accuracy of an output in dB: inf if the output is exact, -inf if it contains inf or NaN.

    If the original is zero everywhere, the accuracy is -inf unless the output is near zero.
    """
    if record.max_error is None or (record.sqnr_db is None and record.max_error > _NEAR_ZERO):
        return -math.inf
    return math.inf if record.sqnr_db is None else record.sqnr_db


def worst_records(batches: Iterable[Iterable[OutputRecord]]) -> tuple[OutputRecord, ...]:
    """Return the least accurate record of each output over all batches."""
    worst: dict[str, OutputRecord] = {}
    for record in (each for records in batches for each in records):
        current = worst.setdefault(record.name, record)
        if _badness(record) > _badness(current):
            worst[record.name] = record
    return tuple(worst.values())


def _badness(record: OutputRecord) -> tuple[float, float]:
    return -_decibels(record), record.max_error or 0.0


def nodes_before_choices(model: ir.Model, steps: int) -> set[ir.Node]:
    """Return the nodes that choose by float32 values, and those at most ``steps`` nodes before one."""
    near = dict.fromkeys(filter(_chooses, model.graph.all_nodes()), 0)
    pending = deque(near)
    while pending:
        node = pending.popleft()
        if near[node] == steps:
            continue
        returned = (value for body in bodies_of(node) for value in body.outputs)
        for value in (*node.inputs, *returned):
            producer = None if value is None or not is_float32(value) else value.producer()
            if producer is not None and producer not in near:
                near[producer] = near[node] + 1
                pending.append(producer)
    return set(near)


def _chooses(node: ir.Node) -> bool:
    chooses = node.op_type in CHOOSING | COMPARING and not node.domain
    return chooses and any(map(is_float32, node.inputs))


def orderings(model: ir.Model) -> dict[str, str]:
    """Return the operator of each output that holds the sorted choices of TopK or NonMaxSuppression.

    A TopK along another axis than the last is left out, so its choices are compared by position.
    """
    operators = {}
    for value in model.graph.outputs:
        producer = value.producer()
        while producer is not None and producer.op_type in ("Cast", "Identity"):
            producer = producer.inputs[0].producer() if producer.inputs[0] is not None else None
        if producer is None or is_float32(value):
            continue
        if producer.op_type == "NonMaxSuppression" or (producer.op_type == "TopK" and on_last_axis(producer)):
            operators[str(value.name)] = producer.op_type
    return operators


def comparable_outputs(
    ours: Tensors, exact: Tensors, ordered: Mapping[str, str] | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pair the elements of outputs that are comparable.

    Integers are paired by position, and floats only where the integers that they belong to are equal, such as
    the scores of equal labels. Choices that are sorted, or differ in number, are paired by value, together
    with their floats; a choice without a partner counts as different. An output is paired as a whole if it
    contains inf or NaN where the original is finite. ``ordered`` has the operators of sorted outputs; see
    ``orderings``.
    """
    ordered = ordered or {}
    pairs = {name: (ours[name], exact[name]) for name in exact}
    equal = []
    for name in [name for name, theirs in exact.items() if theirs.ndim and not theirs.is_floating_point()]:
        mine, theirs = ours[name], exact[name]
        others = [other for other in pairs if other == name or other not in ordered]
        if mine.shape == theirs.shape and ordered.get(name) == "TopK":
            depth, rows = theirs.ndim, _equal_rows(_in_groups(mine), _in_groups(theirs))
            alike = [other for other in ordered if exact[other].shape == theirs.shape]
            for other in others if len(alike) == 1 else [name]:
                pair = pairs[other]
                if all(tensor.shape[:depth] == theirs.shape for tensor in pair):
                    flat = pair[0].flatten(0, depth - 1), pair[1].flatten(0, depth - 1)
                    pairs[other] = _at_rows(flat, rows)
        elif mine.shape[1:] == theirs.shape[1:] and (mine.shape != theirs.shape or name in ordered):
            rows = _equal_rows(mine, theirs)
            for other in others:
                pair = pairs[other]
                if pair[0].ndim and [*map(len, pair)] == [len(mine), len(theirs)]:
                    pairs[other] = _at_rows(pair, rows)
        elif mine.shape == theirs.shape:
            equal.append(mine == theirs)
    for name, pair in pairs.items():
        if breaks(ours[name], exact[name]):
            pairs[name] = ours[name], exact[name]
        elif pair[1].is_floating_point():
            pairs[name] = _where(equal, *pair)
    return pairs


def breaks(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether an output is inf or NaN where that of the original is finite."""
    if ours.shape != exact.shape:
        return bool(exact.isfinite().all()) and not bool(ours.isfinite().all())
    return bool((exact.isfinite() & ~ours.isfinite()).any())


def _in_groups(indices: torch.Tensor) -> torch.Tensor:
    """Return rows of (group, index) for choices along the last axis."""
    groups = torch.arange(indices.shape[:-1].numel()).repeat_interleave(indices.shape[-1])
    return torch.stack([groups, indices.flatten()], 1)


def _where(
    equal: Sequence[torch.Tensor], ours: torch.Tensor, exact: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements that belong to equal choices; all elements if there are none."""
    if not equal:
        return ours, exact
    mask = torch.ones_like(exact, dtype=torch.bool)
    for each in equal:
        if each.shape != exact.shape[: each.ndim]:
            each = each.flatten(1).all(1) if each.ndim > 1 else each  # one truth value per box
        if ours.shape == exact.shape and each.shape == exact.shape[: each.ndim]:
            mask &= each.reshape(*each.shape, *[1] * (exact.ndim - each.ndim))
    return (ours, exact) if mask.all() or not mask.any() else (ours[mask], exact[mask])


def _equal_rows(ours: torch.Tensor, exact: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the positions of rows that both tensors contain, each row once."""
    places = defaultdict[str, deque[int]](deque)
    for place, row in enumerate(exact.tolist()):
        places[str(row)].append(place)
    paired = [
        (place, places[str(row)].popleft()) for place, row in enumerate(ours.tolist()) if places[str(row)]
    ]
    return [mine for mine, _ in paired], [theirs for _, theirs in paired]


def _at_rows(
    pair: tuple[torch.Tensor, torch.Tensor], rows: tuple[list[int], list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the paired rows; for integers, add a differing pair for each row without a partner."""
    ours, exact = (tensor[places] for tensor, places in zip(pair, rows, strict=True))
    if exact.is_floating_point():
        return ours, exact
    alone = (max(map(len, pair)) - len(exact), *exact.shape[1:])
    return torch.cat([ours, ours.new_zeros(alone)]), torch.cat([exact, exact.new_ones(alone)])


class OtherBatch(NamedTuple):
    """A variation of a batch."""

    what: str  # description of the variation, which completes "with ..."
    batch: Batch
    padded: bool = False  # whether its masks differ


def other_batches(inputs: Sequence[GraphInput], batch: Batch, seed: int) -> Iterator[OtherBatch]:
    """Yield variations of a batch: larger or shuffled inputs, padding at the start, and larger integers."""
    values = by_name(batch, [spec.name for spec in inputs])
    random = torch.Generator().manual_seed(seed)
    shuffled = {spec.name: _shuffled(spec, values[spec.name], random) for spec in inputs}
    batches = {spec.sizes[0] if len(spec.sizes) > 1 else None for spec in inputs if spec.sizes}
    current = {
        name: size
        for spec in inputs
        for name, size in zip(spec.sizes or (), values[spec.name].shape, strict=False)
        if isinstance(name, str)
    }
    sizes = {
        name: size + 1 if batches == {name} else _LARGER * size + 1 if size else 0
        for name, size in current.items()
        if not is_sum(name, current)
    }
    tiled = {spec.name: _tiled(spec, shuffled[spec.name], sizes) for spec in inputs}
    if sizes and all(tensor.numel() <= _MAX_ELEMENTS for tensor in tiled.values()):
        axes = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        yield OtherBatch(f"larger sizes ({axes})", batch_of(inputs, tiled))
    else:
        yield OtherBatch("other values", batch_of(inputs, shuffled))
    padded = {spec.name: _padded(spec, values[spec.name]) for spec in inputs}
    if masks := _changed(padded, values):
        what = f"padding at the start ({', '.join(masks)} = 0)"
        yield OtherBatch(what, batch_of(inputs, padded), padded=True)
    extreme = {spec.name: _extreme(spec, values[spec.name]) for spec in inputs}
    if changed := _changed(extreme, values):
        largest = ", ".join(f"{name} up to {int(extreme[name].long().amax())}" for name in changed)
        yield OtherBatch(f"larger integers ({largest})", batch_of(inputs, extreme))


def _changed(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, values[name])]


def _extreme(spec: GraphInput, value: torch.Tensor) -> torch.Tensor:
    """Replace integers by the largest ones that are valid; masks and floats stay unchanged."""
    if value.dtype == torch.bool or value.is_floating_point() or not value.numel():
        return value
    if spec.rows or value.dtype.itemsize == 1:
        largest = torch.iinfo(value.dtype).max
        return torch.full_like(value, min(spec.rows - 1, largest) if spec.rows else largest)
    wide = value.long()  # few operations take unsigned integers
    return value if int(wide.abs().amax()) <= 1 else (wide * _LONGER).to(value.dtype)


def _padded(spec: GraphInput, value: torch.Tensor) -> torch.Tensor:
    """Mask the first half of a sequence; inputs other than masks stay unchanged."""
    if not _is_mask(spec, value) or value.ndim < 2:
        return value
    padded = value.clone()
    padded[..., : value.shape[-1] // 2] = 0
    return padded


def _is_mask(spec: GraphInput, value: torch.Tensor) -> bool:
    """Return whether an input contains only 0 and 1, like an attention mask, and is not an index."""
    return not spec.rows and bool(((value == 0) | (value == 1)).all())


def _shuffled(spec: GraphInput, value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Shuffle the elements of a float input, and replace indices by random ones."""
    if spec.rows and not value.is_floating_point():
        return torch.randint(0, spec.rows, value.shape, generator=random).to(value.dtype)
    if not value.is_floating_point():
        return value  # masks and lengths must stay consistent
    return value.reshape(-1)[torch.randperm(value.numel(), generator=random)].reshape(value.shape)


def _tiled(spec: GraphInput, value: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
    """Resize the open axes of an input by repeating its elements."""
    for axis, size in enumerate(spec.sizes or ()):
        if value.shape[axis]:
            target = size_of(size, sizes)
            value = value.index_select(axis, torch.arange(target) % value.shape[axis])
    return value
