"""Converts an ONNX model in place: the same graph, with casts where the audit needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
import torch

from ampaudit.checkpoint import MANIFEST, ONNX, PLAN, REPORT
from ampaudit.core.errors import AuditError, RunFailed, UsageError
from ampaudit.core.files import check_unchanged, staged_directory
from ampaudit.core.session import Progress, Session
from ampaudit.core.text import format_number, plural
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import conversion_of, manifest_of, write_manifest
from ampaudit.export.onnx.check import checking
from ampaudit.export.onnx.outputs import (
    OnnxRun,
    Original,
    OtherBatch,
    describe_inaccurate,
    other_batches,
    refuse_broken,
    worst_records,
)
from ampaudit.export.onnx.plan import OnnxPlan, PlanRequirements, decisions_of, plan_onnx
from ampaudit.export.onnx.rewrite import Rewriter, choose_types
from ampaudit.export.onnx.torch_export import annotate_graph
from ampaudit.export.onnx.types import TYPELESS, is_float32, nonstandard_operators
from ampaudit.export.onnx.write import ONNX_FLOATS, casts_in, write_model
from ampaudit.export.plan_file import plan_rules
from ampaudit.export.weight_files import WeightFiles
from ampaudit.render.json import to_json
from ampaudit.render.render import keeping
from ampaudit.report.conversion import Conversion, OutputRecord
from ampaudit.report.model import Report
from ampaudit.source import ModelSource
from ampaudit.source.onnx.files import read_onnx
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.source.onnx.source import inputs_of
from ampaudit.trace.values import LOW_PRECISION_DTYPES

_FLIPPED = "AMP209"
_INACCURATE = "AMP207"
_CHOICES_DB = 40.0  # accuracy if one integer in a hundred differs
_STEPS = (8, 64)  # numbers of nodes before a choice to keep in float32 if too many choices change


class _WrittenFile(NamedTuple):
    """Summary of a written file."""

    casts: int  # between float formats
    stored: dict[str, int]  # number of stored tensors by dtype
    sizes: tuple[int, int]  # bytes of the weights before and after
    notes: tuple[str, ...]


def convert_onnx(
    source: ModelSource, directory: Path, config: ConvertConfig, session: Session
) -> tuple[Report, Conversion | None]:
    """Audit an ONNX model, and write it with casts and 16-bit weights if nothing breaks.

    Returns:
        The report, and the conversion, or ``None`` if findings at or above ``fail_on`` prevented it.

    Raises:
        AuditError: See ``ampaudit.core.errors``; nothing is left behind.
    """
    _refuse_options(config)
    plan = _passing_plan(source, config, session, PlanRequirements())
    report = plan.audited.report
    if report.exit_code:
        return report, None
    with keeping(report), staged_directory(directory, force=config.force, marker=MANIFEST) as stage:
        plan, file, outputs, faults = _write_until_accurate(plan, source, stage / ONNX, config, session)
        traced, report = plan.audited.audit.converted.traced, plan.audited.report
        (stage / PLAN).write_text(plan_rules(traced, plan.audited.rules, source.location), "utf-8")
        (stage / REPORT).write_text(to_json(report), "utf-8")
        manifest = manifest_of(
            config.changed(policy=plan.audited.rules, masters=False),
            WeightFiles(),
            kind="model",
            source=source.location,
            source_sha256=source.sha256,
            seed=config.seed,
            clip=None,
            notes=(*traced.notes, *file.notes, *faults),
            outputs=outputs,
        )
        manifest = write_manifest(stage, manifest)
        check_unchanged(source.files)
    return report, replace(
        conversion_of(manifest, directory),
        verdict=report.verdict,
        bytes_before=file.sizes[0],
        bytes_after=file.sizes[1],
        stored=file.stored,
        onnx_casts=file.casts,
        inputs=source.inputs,
        gaps=report.gaps,
    )


def _passing_plan(
    source: ModelSource, config: ConvertConfig, session: Session, requirements: PlanRequirements
) -> OnnxPlan:
    """Keep more and more nodes in float32 until the audit finds no changed choice or inaccurate output."""
    while True:
        plan = plan_onnx(source, config, session, requirements)
        codes = {finding.code for finding in plan.audited.report.findings}
        more = _more_before_choices(requirements) if _FLIPPED in codes else None
        if more is None and _INACCURATE in codes and requirements.accuracy is None and config.tune is None:
            more = replace(requirements, accuracy=config.min_sqnr)
        if not plan.audited.report.exit_code or more is None or config.names_policy:
            return plan
        requirements = more


def _more_before_choices(requirements: PlanRequirements) -> PlanRequirements | None:
    """Return the requirements with more nodes before choices in float32; ``None`` if there are no more."""
    steps = next((steps for steps in _STEPS if steps > requirements.before_choices), None)
    return None if steps is None else replace(requirements, before_choices=steps)


def _write_until_accurate(
    plan: OnnxPlan, source: ModelSource, path: Path, config: ConvertConfig, session: Session
) -> tuple[OnnxPlan, _WrittenFile, tuple[OutputRecord, ...], list[str]]:
    """Write the file and run it; repeat this with more nodes in float32 while that may fix its faults.

    Returns:
        The plan, the summary of the file, its outputs on the source's batches, and its faults on other
        inputs.

    Raises:
        RunFailed: An output is less accurate than required.
    """
    assert isinstance(source.model, OnnxModel)
    model = source.model
    is_low = any(weight.dtype in LOW_PRECISION_DTYPES for weight in model.parameters())
    reference = OnnxRun(model, config) if is_low else None
    originals = [Original(model, batch, config.seed, reference) for batch in source.batches]
    others = [
        (other, Original(model, other.batch, config.seed, reference))
        for other in other_batches(inputs_of(model.inputs), source.batches[0], config.seed)
    ]
    while True:
        file, outputs, faults = _write_and_run(plan, path, originals, others, config, session.on_progress)
        requirements = _next_requirements(plan, outputs, faults, config)
        if requirements is None:
            break
        next_plan = _passing_plan(source, config, session, requirements)
        if next_plan.audited.report.exit_code:
            break  # keep the written file, and report its faults
        plan = next_plan
    if (inaccurate := describe_inaccurate(outputs, config.min_sqnr)) and config.fail_on != "never":
        hint = f"{config.min_sqnr:g} dB are required: --min-sqnr, or a policy that keeps more in float32"
        raise RunFailed(f"the written file computes {inaccurate}", hint=hint)
    return plan, file, outputs, [fault.text for fault in faults]


class _Fault(NamedTuple):
    """A wrong result of a file on a variation of the inputs."""

    other: OtherBatch
    records: tuple[OutputRecord, ...]
    text: str


def _next_requirements(
    plan: OnnxPlan, outputs: tuple[OutputRecord, ...], faults: Sequence[_Fault], config: ConvertConfig
) -> PlanRequirements | None:
    """Return the requirements for the next plan; ``None`` if the file is right, or nothing is left to try."""
    requirements = plan.requirements
    inaccurate = describe_inaccurate(outputs, config.min_sqnr)
    padded = any(fault.other.padded for fault in faults)
    if plan.clamped and (inaccurate or padded):  # a completely masked row may need the original mask
        return replace(requirements, clamp=False)
    if config.names_policy:
        return None
    every = (*outputs, *(record for fault in faults for record in fault.records))
    changed = describe_inaccurate(every, config.min_sqnr, _CHOICES_DB) and plan.chooses
    if changed and (more := _more_before_choices(requirements)) is not None:
        return more
    if inaccurate and requirements.accuracy is None and config.tune is None:
        return replace(requirements, accuracy=config.min_sqnr)
    if faults and not requirements.other_batches:
        return replace(requirements, other_batches=tuple(fault.other.batch for fault in faults))
    return None


def _write_and_run(
    plan: OnnxPlan,
    path: Path,
    originals: Sequence[Original],
    others: Sequence[tuple[OtherBatch, Original]],
    config: ConvertConfig,
    on_progress: Progress,
) -> tuple[_WrittenFile, tuple[OutputRecord, ...], list[_Fault]]:
    """Write the file of a plan, and run it.

    Raises:
        RunFailed: The file computes inf or NaN from the given inputs.
    """
    on_progress("writing the graph", 0, 0)
    result = _write(plan, path, config)
    on_progress("running the file", 0, 0)
    nonstandard = nonstandard_operators(plan.file.model)
    with checking(path, runtime=config.dtype == "float16", nonstandard=nonstandard):
        file, records = OnnxRun(OnnxModel(read_onnx(path)).eval(), config), []
        for number, original in enumerate(originals):
            ours = file.outputs(original.batch, original.exact, number)
            records.append(file.records(ours, original.exact))
            refuse_broken(records[-1], ours, original, config)
        faults = [_fault(file, other, original, config.min_sqnr) for other, original in others]
        return result, worst_records(records), [fault for fault in faults if fault is not None]


def _fault(file: OnnxRun, other: OtherBatch, original: Original, min_sqnr: float) -> _Fault | None:
    """Return the fault of a file on other inputs; ``None`` if there is none, or nothing to compare with."""
    try:
        comparable = all(map(_is_comparable, original.exact.values()))
    except Exception:  # any error of torch about sizes that do not fit together
        return None
    if not comparable:
        return None
    try:
        records = tuple(file.records(file.outputs(original.batch, original.exact), original.exact))
    except RunFailed as failed:
        return _Fault(other, (), f"with {other.what}, {failed.args[0]}")
    except AuditError:  # the size cannot be run here
        return None
    inaccurate = describe_inaccurate(records, min_sqnr, _CHOICES_DB)
    return (
        _Fault(other, records, f"with {other.what}, the file computes {inaccurate}") if inaccurate else None
    )


def _is_comparable(exact: torch.Tensor) -> bool:
    """Return whether an output of the original can be compared: without NaN and inf; -inf may be a mask."""
    if not exact.is_floating_point() or not exact.numel():
        return True
    return bool(exact.isfinite().any()) and not bool((exact.isnan() | exact.isposinf()).any())


def _refuse_options(config: ConvertConfig) -> None:
    model_options = (("--mode train", config.mode == "train"), ("--no-program", not config.program))
    weight_options = (("--no-masters", not config.masters), ("--rescale", config.rescale))
    for flag, set_by_user in (*model_options, *weight_options):
        if set_by_user:
            raise UsageError(f"{flag} has no effect on an .onnx file", hint=f"leave out {flag}")
    if config.onnx or config.dynamic:
        flag = "--onnx" if config.onnx else "--dynamic"
        raise UsageError(f"{flag}: the model is an .onnx file already", hint=f"leave out {flag}")
    if config.io not in ("float32", config.dtype):
        hint = f"--io float32, or --io {config.dtype}"
        raise UsageError(f"--io {config.io} is not the format of --dtype {config.dtype}", hint=hint)


def _write(plan: OnnxPlan, path: Path, config: ConvertConfig) -> _WrittenFile:
    model = plan.file.model
    low, low_io = ir.DataType[config.dtype.upper()], config.io != "float32"
    before = _weights(model)
    floats = [node for node in model.graph.all_nodes() if _computes_floats(node)]
    decisions = decisions_of(plan)
    regions = choose_types(model.graph, decisions, model.opset_imports, config.dtype, low_io=low_io)
    for mask in plan.clamped:
        if all(use.node in regions.wide for use in mask.value.uses()):
            mask.restore()  # its readers all compute in float32, which can represent it
    rewriter = Rewriter(model, regions, low, plan.file.tensor, low_io)
    rewriter.rewrite()
    annotate_graph(model, plan.audited.report, plan.names)
    write_model(model, path)
    wide = [plan.names.of(node) for node in floats if node in regions.wide and node.graph is not None]
    after = _weights(model)
    stored = Counter(dtype for dtype, _ in after)
    sizes = sum(size for _, size in before), sum(size for _, size in after)
    notes = tuple(_notes(plan, wide, rewriter.stored))
    return _WrittenFile(sum(casts_in(model).values()), dict(stored), sizes, notes)


def _computes_floats(node: ir.Node) -> bool:
    inputs = () if node.op_type in TYPELESS else node.inputs
    return any(map(is_float32, (*inputs, *node.outputs)))


def _weights(model: ir.Model) -> list[tuple[str, int]]:
    """Return the dtype and the size in bytes of each stored float tensor."""
    return [
        (ONNX_FLOATS[value.const_value.dtype.name], value.const_value.nbytes)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.dtype.name in ONNX_FLOATS
    ]


def _notes(plan: OnnxPlan, wide: list[str], stored: Collection[str]) -> Iterator[str]:
    """Note clamped masks, a raised operator set, and nodes in float32; ``stored`` are values in 16 bits."""
    for mask in plan.clamped:
        if str(mask.value.name) in stored:
            lowest = format_number(mask.lowest)
            yield f"{mask.value.name} is a mask: its {lowest} became a number that the format can represent"
    if plan.opset is not None:
        yield f"the operator set was raised to version {plan.opset}, which has more 16-bit operators"
    if wide:
        names = ", ".join(wide[:3]) + (" ..." if len(wide) > 3 else "")
        yield f"{plural(len(wide), 'node')} in float32: {names}"
