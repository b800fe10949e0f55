"""Traces an audited model again for other shapes, and compares a dynamic program with these traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch.export import ExportedProgram

from ampaudit.audit.scan import Audited
from ampaudit.core.errors import CouldNotAudit, RunFailed, SourceError, first_line
from ampaudit.core.formats import low_precision_format
from ampaudit.export.config import ConvertConfig
from ampaudit.export.dynamic import DynamicShapes
from ampaudit.export.fold import fold_casts, folded_weights
from ampaudit.export.onnx.torch_export import max_difference
from ampaudit.export.onnx.write import run_onnx
from ampaudit.export.program import GraphModel, tensors_only
from ampaudit.export.reference import digest_of_tensors, flat_outputs, run_program
from ampaudit.policy import load_policy
from ampaudit.source import Batch, ModelSource
from ampaudit.trace import Role, TracedModel, trace
from ampaudit.trace.converted import ConvertedModel, attach_weights
from ampaudit.trace.dynamic import Dimensions

__all__ = ["ShapeComparison", "retraced"]

_RANGE = "say which sizes it takes: --dynamic INPUT=NAME:LOW-HIGH,..."
_HINT = "leave out --dynamic, or the dimensions on which the model's code depends"


def retraced(
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
        *(source.model, batch.args, batch.kwargs, audited.rules, load_policy("torch-cuda")),
        low_precision_format(config.dtype),
        seed=config.seed,
        planned={site.id: site.decision for site in before.sites},
        dynamic=dimensions,
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


class ShapeComparison:
    """Compare a dynamic program with traces of the model for other shapes.

    Args:
        program: Program of the converted model.
        source: Model with a batch of values.
        audited: Audit of the model.
        config: Options of the conversion.
        shapes: Variable dimensions.
        onnx: Program as ONNX, if there is one.

    Attributes:
        verified: Sizes at which outputs are bitwise equal.
        onnx_error: Largest difference of ONNX Runtime; ``None`` if it did not run.
    """

    def __init__(
        self,
        program: ExportedProgram,
        source: ModelSource,
        audited: Audited,
        config: ConvertConfig,
        shapes: DynamicShapes,
        onnx: Path | None,
    ) -> None:
        self._given = source, audited, config
        self._program = program
        self._shapes = shapes
        self._onnx = onnx
        self.verified: list[Mapping[str, int]] = []
        self.onnx_error: float | None = None

    def run(self) -> None:
        """Compare at two other shapes, and at the minimum sizes; 1 is required only if a range includes it.

        Raises:
            RunFailed: Outputs are not bitwise equal, or ONNX Runtime's differ too much.
        """
        batch = self._given[0].batches[0]
        others, least = self._shapes.others(batch, self._shapes.final_ranges(self._program))
        for sizes in others:
            self._compare(sizes)
        smallest = {axis: low if axis in self._shapes.ranges else max(low, 2) for axis, low in least.items()}
        if least != smallest:
            with suppress(CouldNotAudit):
                self._compare(least)
                return
        if smallest not in self.verified:
            self._compare(smallest)

    def _compare(self, sizes: Mapping[str, int]) -> None:
        source, audited, config = self._given
        batch = self._shapes.resized(source.batches[0], sizes)
        try:
            converted = retraced(source, audited, batch, config)
            expected = self._expected(converted, batch)
        except (SourceError, IndexError) as error:
            raise RunFailed(
                f"the model itself fails at {_text(sizes)}: {first_line(error)}",
                hint=_RANGE,
            ) from error
        if isinstance(expected, str):
            return  # a note about the program's outputs says so
        names = converted.traced.outputs
        call = batch.args, tensors_only(batch.kwargs)
        try:
            outputs = run_program(self._program.module(), call, config.seed)
        except AssertionError as error:  # a guard of the program
            outputs = first_line(error)
        _refuse_difference(outputs, expected, names, sizes)
        if self._onnx is not None:
            self._compare_onnx(self._onnx, flat_outputs(call), list(zip(names, expected, strict=True)), sizes)
        self.verified.append(sizes)

    def _expected(self, converted: ConvertedModel, batch: Batch) -> list[torch.Tensor] | str:
        """Run the graph that was traced for these shapes."""
        source, _, config = self._given
        folded = fold_casts(converted, config.mode)
        weights, names = folded_weights(converted, folded, {}), converted.traced.outputs
        model = GraphModel(folded, weights, names, train=config.mode == "train")
        model.train(source.model.training)
        return run_program(model, (batch.args, batch.kwargs), config.seed)

    def _compare_onnx(
        self,
        path: Path,
        inputs: list[torch.Tensor],
        expected: list[tuple[str, torch.Tensor]],
        sizes: Mapping[str, int],
    ) -> None:
        try:
            outputs = run_onnx(path, inputs)
        except Exception as error:
            raise RunFailed(
                f"model.onnx does not run at {_text(sizes)}: {first_line(error)}", hint=_HINT
            ) from error
        self.onnx_error = max(self.onnx_error or 0.0, max_difference(outputs, expected))


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _refuse_difference(
    outputs: list[torch.Tensor] | str,
    expected: list[torch.Tensor],
    names: Sequence[str],
    sizes: Mapping[str, int],
) -> None:
    if isinstance(outputs, str):
        raise RunFailed(f"the program does not run at {_text(sizes)}: {outputs}", hint=_RANGE)
    for name, ours, theirs in zip(names, outputs, expected, strict=True):
        if digest_of_tensors([ours]) != digest_of_tensors([theirs]):
            raise RunFailed(
                f"the program computes another {name} at {_text(sizes)} than the model", hint=_HINT
            )
