"""Parses ``--dynamic``, the input dimensions that may vary, and checks programs at other sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ampaudit.audit.scan import Audited
from ampaudit.core.errors import CouldNotAudit, RunFailed, SourceError, UsageError, did_you_mean, first_line
from ampaudit.core.formats import low_precision_format
from ampaudit.core.untrusted import describe
from ampaudit.export.config import ConvertConfig
from ampaudit.export.fold import fold_casts, folded_weights
from ampaudit.export.program import (
    GraphModel,
    digest_of_tensors,
    exportable_arguments,
    flat_outputs,
    names_of_inputs,
    run_program,
)
from ampaudit.policy import load_policy
from ampaudit.report.conversion import ProgramShapes
from ampaudit.source import Batch, ModelSource
from ampaudit.source.inputs import with_tensors
from ampaudit.trace import Role, TraceConfig, TracedModel, trace
from ampaudit.trace.capture import Dimensions
from ampaudit.trace.converted import ConvertedModel, attach_weights
from ampaudit.trace.entry import names_of_tensors, tensor_leaves

_RANGE = "say which sizes it takes: --dynamic INPUT=NAME:LOW-HIGH,..."
_HINT = "leave out --dynamic, or the dimensions on which the model's code depends"
_DIMENSION = re.compile(r"^([^\W\d]\w*)(?::(\d{1,9})-(\d{1,9})?)?$")
_FIXED = "_"
_FORM = "write INPUT=DIM,DIM: a name for each dimension that may vary, _ for a fixed one"


@dataclass(frozen=True, slots=True)
class DynamicShapes:
    """Names for the dimensions of a batch's tensors; dimensions with the same name have the same size."""

    inputs: tuple[str, ...]  # names of the tensors
    axes: tuple[tuple[str | int, ...], ...]  # name of each dimension of each tensor, or its fixed size
    ranges: Mapping[str, tuple[int, int | None]]  # minimum and maximum by dimension, if the user set them

    @classmethod
    def parse(cls, texts: Sequence[str], model: nn.Module, batch: Batch) -> DynamicShapes:
        """Parse the values of ``--dynamic``, and match them with the inputs of a model.

        Raises:
            UsageError: There is no such input, or the dimensions do not fit it.
        """
        tensors = tensor_leaves(batch.args, batch.kwargs)
        names = names_of_inputs(model, batch.args, batch.kwargs)
        names = names or names_of_tensors(batch.args, batch.kwargs)
        axes: list[tuple[str | int, ...]] = [tuple(tensor.shape) for tensor in tensors]
        ranges: dict[str, tuple[int, int | None]] = {}
        for text in texts:
            name, equals, dimensions = text.partition("=")
            if not equals:
                raise UsageError(f"--dynamic {describe(text)}", hint=_FORM)
            number = _index_of(name.strip(), names)
            axes[number] = tuple(_axes_of(text, dimensions.split(","), tensors[number], ranges))
        shapes = cls(tuple(names), tuple(axes), ranges)
        shapes.sizes(batch)
        return shapes

    def sizes(self, batch: Batch) -> dict[str, int]:
        """Return the size of each dimension in a batch.

        Raises:
            UsageError: A name stands for two sizes, or for a size out of its range.
        """
        first: dict[str, tuple[int, str]] = {}
        tensors = tensor_leaves(batch.args, batch.kwargs)
        for name, axes, tensor in zip(self.inputs, self.axes, tensors, strict=True):
            for axis, size in zip(axes, tensor.shape, strict=True):
                if isinstance(axis, int):
                    continue
                before, other = first.setdefault(axis, (size, name))
                low, high = self.ranges.get(axis, (0, None))
                if before != size:
                    raise UsageError(
                        f"--dynamic: {axis} is {before} in {other} and {size} in {name}",
                        hint="one name stands for one size: give these dimensions two names",
                    )
                if size < low or (high is not None and size > high):
                    raise UsageError(f"--dynamic: {axis} is {size} in {name}, out of its range")
        return {axis: size for axis, (size, _) in first.items()}

    def dimensions(self) -> Dimensions:
        """Return the dynamic dimensions of each tensor for ``torch.export``."""
        dims = {axis: self._dim(axis) for axes in self.axes for axis in axes if isinstance(axis, str)}
        return tuple({index: dims[axis] for index, axis in axes.items()} or None for axes in self.axis_names)

    @property
    def axis_names(self) -> list[dict[int, str]]:
        """Names of the variable axes of each tensor."""
        return [
            {index: axis for index, axis in enumerate(axes) if isinstance(axis, str)} for axes in self.axes
        ]

    def _dim(self, name: str) -> Any:
        low, high = self.ranges.get(name, (None, None))
        return Dim(name, min=low, max=high)

    def resized(self, batch: Batch, sizes: Mapping[str, int]) -> Batch:
        """Return a batch with other sizes; rows are repeated or dropped, so that values stay valid."""
        replacements: dict[int, torch.Tensor] = {}
        for axes, tensor in zip(self.axes, tensor_leaves(batch.args, batch.kwargs), strict=True):
            changed = tensor
            for index, axis in enumerate(axes):
                if isinstance(axis, str) and sizes[axis] != tensor.shape[index]:
                    rows = torch.arange(sizes[axis], device=tensor.device) % max(tensor.shape[index], 1)
                    changed = changed.index_select(index, rows)
            replacements.setdefault(id(tensor), changed)
        return with_tensors(batch, [replacements[id(t)] for t in tensor_leaves(batch.args, batch.kwargs)])

    def traceable(self, batch: Batch) -> Batch:
        """Return a batch for tracing: a size of 1 becomes 2, because torch.export treats 1 as a constant."""
        return self.resized(batch, {axis: max(size, 2) for axis, size in self.sizes(batch).items()})

    def final_ranges(self, program: ExportedProgram) -> dict[str, tuple[int, int | None]]:
        """Return the range of each dimension for which a program is valid."""
        fakes = [
            node.meta["val"]
            for node in program.graph.find_nodes(op="placeholder")
            if node.name in program.graph_signature.user_inputs
        ]
        ranges: dict[str, tuple[int, int | None]] = {}
        for axes, fake in zip(self.axes, (f for f in fakes if isinstance(f, torch.Tensor)), strict=True):
            for axis, size in zip(axes, fake.shape, strict=True):
                if isinstance(axis, str) and isinstance(size, torch.SymInt):
                    limits = program.range_constraints[size.node.expr]
                    high = int(limits.upper) if limits.upper.is_Integer else None
                    ranges[axis] = max(int(limits.lower), self.ranges.get(axis, (1, None))[0]), high
        return ranges

    def other_sizes(
        self, batch: Batch, ranges: Mapping[str, tuple[int, int | None]]
    ) -> tuple[list[dict[str, int]], dict[str, int]]:
        """Return sizes larger and smaller than those of a batch, and the minimum sizes."""
        sizes: list[dict[str, int]] = [{}, {}]
        for axis, size in self.sizes(batch).items():
            low, high = ranges[axis]
            candidates = (2 * size + 1, size // 2, size + 1, size - 1, size + 2)
            fitting = [
                n for n in candidates if n >= max(low, 2) and n != size and (high is None or n <= high)
            ]
            fitting = fitting or [size]
            sizes[0][axis], sizes[1][axis] = fitting[0], fitting[min(1, len(fitting) - 1)]
        return sizes, {axis: low for axis, (low, _) in ranges.items()}

    def describe(self, program: ExportedProgram, verified: Sequence[Mapping[str, int]]) -> ProgramShapes:
        """Describe the inputs of a program; its ranges include a size of 1 only if that was verified."""
        ranges = self.final_ranges(program)
        for axis, (low, high) in ranges.items():
            if low < 2 and all(sizes[axis] > low for sizes in verified):
                ranges[axis] = 2, high
        inputs = dict(zip(self.inputs, self.axes, strict=True))
        return ProgramShapes(inputs, ranges, tuple(map(dict, verified)))


def _index_of(name: str, names: Sequence[str]) -> int:
    """Return the index of a tensor from its name, or from its index as text."""
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    if name in names:
        return names.index(name)
    raise UsageError(
        f"--dynamic: no input {describe(name)!r}",
        hint=f"{did_you_mean(name, names)}the inputs are: {describe(', '.join(names)) or 'none'}",
    )


def _axes_of(
    text: str, dimensions: Sequence[str], tensor: torch.Tensor, ranges: dict[str, tuple[int, int | None]]
) -> Iterator[str | int]:
    """Yield the name or fixed size of each dimension of a tensor, and add ranges to ``ranges``."""
    if len(dimensions) != tensor.ndim:
        raise UsageError(
            f"--dynamic {describe(text)}: the input has {tensor.ndim} dimensions {tuple(tensor.shape)}",
            hint=_FORM,
        )
    for dimension, size in zip(dimensions, tensor.shape, strict=True):
        match = _DIMENSION.match(dimension.strip())
        if dimension.strip() == _FIXED:
            yield size
        elif match is None:
            raise UsageError(f"--dynamic: {describe(dimension)!r} is not a name for a dimension", hint=_FORM)
        else:
            name, low, high = match.groups()
            if low is not None:
                limits = _range_of(name, int(low), int(high) if high else None)
                if ranges.setdefault(name, limits) != limits:
                    raise UsageError(f"--dynamic: {name} has two ranges", hint="one name stands for one size")
            yield name


def _range_of(name: str, low: int, high: int | None) -> tuple[int, int | None]:
    """Validate a range; sizes start at 1, since batches are never empty."""
    low = max(low, 1)
    if high is not None and high < low:
        raise UsageError(f"--dynamic: the range of {name} is empty", hint="write NAME:LOW-HIGH")
    if high == low:
        raise UsageError(
            f"--dynamic: the range of {name} is one size", hint="write _ for a dimension that does not vary"
        )
    return low, high


def retrace(
    source: ModelSource,
    audited: Audited,
    batch: Batch,
    config: ConvertConfig,
    dimensions: Dimensions | None = None,
) -> ConvertedModel:
    """Trace a model under the decisions of its audit, for a batch of other shapes.

    Raises:
        TraceFailed: A dimension cannot vary.
        RunFailed: The model runs ops that were not audited.
    """
    before = audited.audit.converted.traced
    traced = trace(
        source.model,
        batch.args,
        batch.kwargs,
        TraceConfig(
            audited.rules,
            load_policy("torch-cuda"),
            low_precision_format(config.dtype),
            seed=config.seed,
            planned={site.id: site.decision for site in before.sites},
            dynamic=dimensions,
        ),
    )
    ours, theirs = _computed(before), _computed(traced)
    other = next((site for site in {**theirs, **ours} if ours.get(site) != theirs.get(site)), None)
    if other is not None:
        raise RunFailed(
            f"{other} is not the same op for other shapes, so the audit does not cover it", hint=_HINT
        )
    return attach_weights(traced, source.release)


def _computed(traced: TracedModel) -> dict[str, tuple[object, ...]]:
    """Return the op and the dtype of every computing site."""
    return {
        site.id: (site.op, site.decision.cast, site.dtype)
        for site in traced.sites
        if site.facts is not None and site.role is Role.COMPUTE
    }


def compare_shapes(
    program: ExportedProgram,
    source: ModelSource,
    audited: Audited,
    config: ConvertConfig,
    shapes: DynamicShapes,
    onnx: Path | None,
) -> tuple[list[Mapping[str, int]], float]:
    """Compare a dynamic program with traces of the model, at two other shapes and at the minimum sizes.

    It must work at a size of 1 only if the user's range includes it. ``onnx`` is the ONNX file of the
    program.

    Returns:
        The sizes at which outputs are bitwise equal, and the largest difference of ONNX Runtime.

    Raises:
        RunFailed: Outputs are not bitwise equal, or ONNX Runtime's differ too much.
    """
    verified: list[Mapping[str, int]] = []
    differences: list[float] = []

    def compare(sizes: Mapping[str, int]) -> None:
        batch = shapes.resized(source.batches[0], sizes)
        try:
            converted = retrace(source, audited, batch, config)
            expected = _expected(converted, source, batch, config)
        except (SourceError, IndexError) as error:
            raise RunFailed(
                f"the model itself fails at {_in_words(sizes)}: {first_line(error)}",
                hint=_RANGE,
            ) from error
        if isinstance(expected, str):
            return  # this CPU cannot run it; a note about the program's outputs says so
        names = converted.traced.paths
        call = batch.args, exportable_arguments(batch.kwargs)
        try:
            outputs = run_program(program.module(), call, config.seed)
        except AssertionError as error:  # a guard of the program
            outputs = first_line(error)
        if isinstance(outputs, str):
            raise RunFailed(f"the program does not run at {_in_words(sizes)}: {outputs}", hint=_RANGE)
        for name, ours, theirs in zip(names, outputs, expected, strict=True):
            if digest_of_tensors([ours]) != digest_of_tensors([theirs]):
                raise RunFailed(
                    f"the program's {name} differs from the model's at {_in_words(sizes)}", hint=_HINT
                )
        if onnx is not None:
            from ampaudit.export.onnx.torch_export import max_difference
            from ampaudit.export.onnx.write import run_onnx

            try:
                onnx_outputs = run_onnx(onnx, flat_outputs(call))
            except Exception as error:
                raise RunFailed(
                    f"model.onnx does not run at {_in_words(sizes)}: {first_line(error)}", hint=_HINT
                ) from error
            differences.append(max_difference(onnx_outputs, list(zip(names, expected, strict=True))))
        verified.append(sizes)

    others, minimum = shapes.other_sizes(source.batches[0], shapes.final_ranges(program))
    for sizes in others:
        compare(sizes)
    required = {axis: low if axis in shapes.ranges else max(low, 2) for axis, low in minimum.items()}
    if minimum != required:
        with suppress(CouldNotAudit):
            compare(minimum)
            return verified, max(differences, default=0.0)
    if required not in verified:
        compare(required)
    return verified, max(differences, default=0.0)


def _expected(
    converted: ConvertedModel, source: ModelSource, batch: Batch, config: ConvertConfig
) -> list[torch.Tensor] | str:
    """Run a graph that was traced for the shapes of a batch."""
    folded = fold_casts(converted, config.mode)
    weights = folded_weights(converted, folded, {})
    model = GraphModel(folded, weights, converted.traced.paths, train=config.mode == "train")
    model.train(source.model.training)
    return run_program(model, (batch.args, batch.kwargs), config.seed)


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
