"""Converts an ONNX model in place: the same graph, with casts where the audit needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ampaudit.checkpoint.layout import MANIFEST, ONNX, PLAN, REPORT
from ampaudit.core.errors import RunFailed, UsageError
from ampaudit.core.files import staged_directory
from ampaudit.core.text import format_number, plural
from ampaudit.core.unchanged import check_unchanged
from ampaudit.core.untrusted import describe
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import Manifest, manifest_of, write_manifest
from ampaudit.export.onnx.check import checking
from ampaudit.export.onnx.metadata import annotate_graph
from ampaudit.export.onnx.other_inputs import faults_on_other_inputs
from ampaudit.export.onnx.outputs import least_accuracy, outputs_of
from ampaudit.export.onnx.plan import OnnxPlan, decisions_of, plan_onnx
from ampaudit.export.onnx.regions import choose_types
from ampaudit.export.onnx.rewrite import Rewriter
from ampaudit.export.onnx.types import is_float32, strangers_in
from ampaudit.export.onnx.write import ONNX_FLOATS, casts_in, write_model
from ampaudit.export.plan_file import plan_rules
from ampaudit.export.weight_files import WeightFiles
from ampaudit.render.json import to_json
from ampaudit.render.render import keeping
from ampaudit.report.conversion import Conversion, OutputRecord
from ampaudit.report.model import Report
from ampaudit.source import ModelSource

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["convert_onnx"]


class _Written(NamedTuple):
    """A file: its casts, the nodes that stay in float32, and its weights.

    Attributes:
        casts: between float formats.
        wide: nodes that stay in float32.
        lowered: names of the values that are stored in 16 bits.
        stored: stored tensors by dtype.
        sizes: bytes of the weights before and after.
    """

    casts: int
    wide: tuple[str, ...]
    lowered: frozenset[str]
    stored: dict[str, int]
    sizes: tuple[int, int]


def convert_onnx(
    source: ModelSource, directory: Path, config: ConvertConfig
) -> tuple[Report, Conversion | None]:
    """Audit an ONNX model, and write it with casts and 16-bit weights if nothing breaks.

    Returns:
        The report, and the conversion, or ``None`` if findings at or above ``fail_on`` prevented it.

    Raises:
        AuditError: see ``ampaudit.core.errors``; nothing is left behind.
    """
    _refuse(config)
    plan = plan_onnx(source, config)
    report = plan.audited.report
    if report.exit_code:
        return report, None
    with keeping(report), staged_directory(directory, force=config.force, ours=MANIFEST) as stage:
        plan, written, outputs = _accurate(plan, source, stage / ONNX, config)
        config.on_progress("running the file on other inputs", 0, 0)
        notes = [*_notes(plan, written), *faults_on_other_inputs(source, stage / ONNX, config)]
        manifest = _with_records(stage, source, plan, config, notes, outputs)
        check_unchanged(source.files)
    report = plan.audited.report
    return report, Conversion(
        source=source.location,
        output=str(directory),
        policy=manifest.policy,
        dtype=manifest.dtype,
        mode=manifest.mode,
        verdict=report.verdict,
        exit_code=0,
        bytes_before=written.sizes[0],
        bytes_after=written.sizes[1],
        stored=written.stored,
        kept={},
        overflow={},
        broken={},
        masters=False,
        outputs=outputs,
        onnx_casts=written.casts,
        onnx_error=None,
        files={name: record.size for name, record in manifest.files.items()},
        notes=manifest.notes,
        inputs=source.inputs,
        gaps=report.gaps,
    )


def _accurate(
    plan: OnnxPlan, source: ModelSource, path: Path, config: ConvertConfig
) -> tuple[OnnxPlan, _Written, tuple[OutputRecord, ...]]:
    """Write the file and run it; if that is not accurate enough, once more with masks as they are.

    Raises:
        RunFailed: an output is less accurate than was asked for.
    """
    written, outputs = _written(plan, source, path, config)
    if plan.clamped and least_accuracy(outputs) < config.min_sqnr:
        # a row that is masked as a whole may need the mask as it is
        plan = plan_onnx(source, config, clamp=False)
        if plan.audited.report.exit_code:
            raise RunFailed("its masks do not fit the format", hint="pass --fail-on never")
        written, outputs = _written(plan, source, path, config)
    if least_accuracy(outputs) < config.min_sqnr and config.fail_on != "never":
        low = [record.name for record in outputs if least_accuracy([record]) < config.min_sqnr]
        accuracy = f"{least_accuracy(outputs):.0f} dB against FP32"
        what = f"the written file computes {describe(', '.join(low))} with {accuracy}"
        hint = f"{config.min_sqnr:g} dB are required: --min-sqnr, or a policy that keeps more in float32"
        raise RunFailed(what, hint=hint)
    return plan, written, outputs


def _with_records(
    stage: Path,
    source: ModelSource,
    plan: OnnxPlan,
    config: ConvertConfig,
    notes: Sequence[str],
    outputs: tuple[OutputRecord, ...],
) -> Manifest:
    """Write the decisions, the report and the manifest beside the file."""
    traced = plan.audited.audit.converted.traced
    (stage / PLAN).write_text(plan_rules(traced, plan.audited.rules, source.location), "utf-8")
    (stage / REPORT).write_text(to_json(plan.audited.report), "utf-8")
    manifest = manifest_of(
        config.changed(policy=plan.audited.rules, masters=False),
        WeightFiles({}, {}, {}),
        kind="model",
        source=source.location,
        source_sha256=source.sha256,
        seed=config.seed,
        clip=None,
        notes=(*traced.notes, *notes),
        outputs=outputs,
    )
    return write_manifest(stage, manifest)


def _written(
    plan: OnnxPlan, source: ModelSource, path: Path, config: ConvertConfig
) -> tuple[_Written, tuple[OutputRecord, ...]]:
    """Write the file of a plan, and run it."""
    config.on_progress("writing the graph", 0, 0)
    written = _write(plan, path, config)
    config.on_progress("running the file", 0, 0)
    strangers = strangers_in(plan.file.model)
    with checking(path, runtime=config.dtype == "float16", strangers=strangers):
        return written, outputs_of(source, path, config)


def _refuse(config: ConvertConfig) -> None:
    """Reject options that say something about other kinds of models."""
    others = (("--mode train", config.mode == "train"), ("--no-program", not config.program))
    more = (("--no-masters", not config.masters), ("--rescale", config.rescale))
    for flag, given in (*others, *more):
        if given:
            raise UsageError(f"{flag} has no effect on an .onnx file", hint=f"leave out {flag}")
    if config.onnx or config.dynamic:
        flag = "--onnx" if config.onnx else "--dynamic"
        raise UsageError(f"{flag}: the model is an .onnx file already", hint=f"leave out {flag}")
    if config.io not in ("float32", config.dtype):
        hint = f"--io float32, or --io {config.dtype}"
        raise UsageError(f"--io {config.io} is not the format of --dtype {config.dtype}", hint=hint)


def _write(plan: OnnxPlan, path: Path, config: ConvertConfig) -> _Written:
    """Rewrite the plan's graph and write it."""
    import onnx_ir as ir

    model = plan.file.model
    low, low_io = ir.DataType[config.dtype.upper()], config.io != "float32"
    before = _weights(model)
    floats = [node for node in model.graph.all_nodes() if any(map(is_float32, (*node.inputs, *node.outputs)))]
    decisions = decisions_of(plan)
    regions = choose_types(model.graph, decisions, model.opset_imports, config.dtype, low_io=low_io)
    for mask in plan.clamped:
        if all(use.node in regions.wide for use in mask.value.uses()):
            mask.restore()  # float32 holds it
    rewriter = Rewriter(model, regions, low, plan.file.tensor, low_io)
    rewriter.rewrite()
    annotate_graph(model, plan.audited.report, plan.names)
    write_model(model, path)
    wide = tuple(plan.names.of(node) for node in floats if node in regions.wide and node.graph is not None)
    after = _weights(model)
    stored = Counter(dtype for dtype, _ in after)
    sizes = sum(size for _, size in before), sum(size for _, size in after)
    return _Written(sum(casts_in(model).values()), wide, frozenset(rewriter.stored), dict(stored), sizes)


def _weights(model: ir.Model) -> list[tuple[str, int]]:
    """Return dtype and bytes of each stored float tensor."""
    return [
        (ONNX_FLOATS[value.const_value.dtype.name], value.const_value.nbytes)
        for graph in (model.graph, *model.graph.subgraphs())
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.dtype.name in ONNX_FLOATS
    ]


def _notes(plan: OnnxPlan, written: _Written) -> list[str]:
    notes = [
        f"{mask.value.name} is a mask: its {format_number(mask.lowest)} became a number that the format holds"
        for mask in plan.clamped
        if str(mask.value.name) in written.lowered
    ]
    if plan.opset is not None:
        notes.append(f"the operator set was raised to version {plan.opset}, which has more 16-bit operators")
    if written.wide:
        shown = ", ".join(written.wide[:3]) + (" ..." if len(written.wide) > 3 else "")
        notes.append(f"{plural(len(written.wide), 'node')} in float32: {shown}")
    return notes
