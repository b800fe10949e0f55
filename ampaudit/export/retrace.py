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
        TraceFailed: a dimension cannot vary.
        RunFailed: the model runs other ops than those that were audited.
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
    """Return what every computing op is, and in which dtype."""
    return {
        site.id: (site.op, site.decision.cast, site.dtype)
        for site in traced.sites
        if site.facts is not None and site.role is Role.COMPUTE
    }


class ShapeComparison:
    """Compares a dynamic program with traces of the model for other shapes.

    Args:
        program: of the converted model.
        source: the model, with the batch that gives values.
        audited: its audit.
        config: of the conversion.
        shapes: what may vary.
        onnx: the program as ONNX, if there is one.

    Attributes:
        verified: the sizes at which every bit is the same.
        onnx_error: ONNX Runtime's largest difference; ``None`` if it did not run.
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
        """Compare at two other shapes, and at the least sizes; 1 is needed only where a range asks for it.

        Raises:
            RunFailed: a bit differs from the trace's, or ONNX Runtime's result is another one.
        """
        batch = self._given[0].batches[0]
        others, least = self._shapes.others(batch, self._shapes.final_ranges(self._program))
        for sizes in others:
            self._compare(sizes)
        asked = {axis: low if axis in self._shapes.ranges else max(low, 2) for axis, low in least.items()}
        if least != asked:
            with suppress(CouldNotAudit):
                self._compare(least)
                return
        if asked not in self.verified:
            self._compare(asked)

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
            return  # as the note about the program's own outputs says
        names = converted.traced.outputs
        call = batch.args, tensors_only(batch.kwargs)
        try:
            found = run_program(self._program.module(), call, config.seed)
        except AssertionError as error:  # a guard of the program
            found = first_line(error)
        _refuse_difference(found, expected, names, sizes)
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
    found: list[torch.Tensor] | str,
    expected: list[torch.Tensor],
    names: Sequence[str],
    sizes: Mapping[str, int],
) -> None:
    if isinstance(found, str):
        raise RunFailed(f"the program does not run at {_text(sizes)}: {found}", hint=_RANGE)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        if digest_of_tensors([ours]) != digest_of_tensors([theirs]):
            raise RunFailed(
                f"the program computes another {name} at {_text(sizes)} than the model", hint=_HINT
            )
