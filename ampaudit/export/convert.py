"""``ampaudit convert``: audits a model, and writes the converted checkpoint if it passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.inputs import Inputs, Model, as_source
from ampaudit.audit.scan import audit_policies
from ampaudit.checkpoint.layout import MANIFEST, ONNX, PLAN, PROGRAM, REFERENCE, REPORT
from ampaudit.checkpoint.mapped import MappedWeights, map_checkpoint
from ampaudit.checkpoint.open import Checkpoint, open_checkpoint, weights_in
from ampaudit.checkpoint.parts import InMemory
from ampaudit.checkpoint.write import write_part
from ampaudit.core.errors import RunFailed, SourceError, UsageError
from ampaudit.core.files import staged_directory
from ampaudit.export.config import ConvertConfig, ConvertOptions
from ampaudit.export.convert_weights import conversion_of
from ampaudit.export.directory import CheckpointSource, finish_directory
from ampaudit.export.fold import Deployed, deploy, weights_of
from ampaudit.export.hf_directory import copy_companions, set_dtype
from ampaudit.export.onnx_file import OnnxFile, input_names, write_onnx
from ampaudit.export.onnx_report import about_report, onnx_notes
from ampaudit.export.plan_file import plan_rules
from ampaudit.export.program import export_program
from ampaudit.export.reference import (
    Call,
    ReferenceOutputs,
    compared,
    digest_of_tensors,
    flat_outputs,
    record_reference,
)
from ampaudit.export.state import checkpoint_of, planned_types
from ampaudit.export.storage import choose_planned
from ampaudit.export.stream import WeightFiles, write_weights
from ampaudit.render.json import to_json
from ampaudit.report.conversion import Conversion
from ampaudit.report.model import Report
from ampaudit.source import ModelSource
from ampaudit.source.checkpoint_names import model_names
from ampaudit.trace.clipping import clipped
from ampaudit.trace.converted import ConvertedModel
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.random_state import preserved

__all__ = ["convert"]

_ONNX_DB = 25.0  # a few roundings of bfloat16; a dropped eps or a lost cast of a norm is worse


@preserved()
def convert(
    model: Model,
    inputs: Inputs | None,
    output: str | Path,
    *,
    config: ConvertConfig | None = None,
    **options: Unpack[ConvertOptions],
) -> tuple[Report, Conversion | None]:
    """Audit a model, and write its converted checkpoint if nothing breaks.

    Args:
        model: in the mode that is meant; it is not changed. Or where to load it from: a path, or
            ``package.module:factory``.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs; ``None``
            takes those of the model's file.
        output: the directory to write.
        config: the options as one value.
        **options: fields of ``ConvertConfig``, which go before those of ``config``.

    Returns:
        The report, and what was written: ``None`` if there are findings from ``fail_on`` on.

    Raises:
        AuditError: see ``ampaudit.core.errors``; nothing is left behind.
    """
    chosen, output = ConvertConfig.given(config, options), Path(output)
    chosen.check(output)
    source = as_source(model, inputs)
    if chosen.onnx and source.release is not None:
        raise UsageError("--onnx holds all weights in memory", hint="leave out --stream or --onnx")
    if source.kind == "converted":
        raise SourceError(f"{source.location} is converted already", hint="--to float32 undoes it")
    chosen = chosen.loaded()
    (audited,) = audit_policies(source, [chosen.rules], ScanConfig.of(chosen))
    report = audited.report
    if report.exit_code:
        return report, None
    converted = audited.audit.converted
    graph = deploy(converted, chosen.mode)
    storage = graph if chosen.mode == "inference" else deploy(converted, "inference")
    checkpoint, names = _checkpoint(source, chosen)
    choices = choose_planned(checkpoint, planned_types(source.model, storage), names)
    notes: list[str] = list(converted.traced.notes)
    with staged_directory(output, force=chosen.force, ours=MANIFEST) as stage:
        if source.kind == "huggingface":
            copy_companions(Path(source.location), stage, output)
            notes += set_dtype(stage, source.model, choices, chosen.dtype)
        limits = converted.traced.clip
        change = None if limits is None else lambda piece: clipped(piece, limits)
        files = write_weights(checkpoint, choices, stage, masters=chosen.masters, change=change)
        (stage / PLAN).write_text(plan_rules(converted.traced, audited.rules, source.location), "utf-8")
        (stage / REPORT).write_text(to_json(report), "utf-8")
        if source.release is None:
            weights = converted, graph, weights_of(converted, graph, {})
            reference, onnx = _write_program(stage, source, weights, report, chosen)
        else:
            mapped, ready = _written(source, graph, stage, files)
            weights = converted, graph, weights_of(converted, graph, ready)
            with mapped.dropping():
                reference, onnx = _write_program(stage, source, weights, report, chosen)
        onnx_error = _onnx_error(onnx, reference) if not source.model.training else None
        notes += [note for note in (reference.note, onnx.note if onnx else "") if note]
        origin = CheckpointSource(source.location, source.sha256, "model", chosen, chosen.seed, limits)
        inputs = [t for name, t in reference.tensors.items() if name.startswith("input")]
        manifest = finish_directory(
            stage, origin, files, notes, reference.outputs, digest_of_tensors(inputs) if inputs else None
        )
    made = conversion_of(output, checkpoint, files, chosen, source.location)
    return report, replace(
        made,
        verdict=report.verdict,
        outputs=reference.outputs,
        onnx_casts=onnx.casts if onnx else None,
        onnx_error=onnx_error,
        files={name: record.size for name, record in manifest.files.items()},
        notes=tuple(notes),
    )


def _checkpoint(source: ModelSource, options: ConvertConfig) -> tuple[Checkpoint, dict[str, str]]:
    """Where the tensors are read from, and the model's names for them where these are others.

    Files if there are any, so that all that is in them survives.
    """
    if options.weights is not None:
        return open_checkpoint(options.weights), {}
    if source.kind != "huggingface":
        return checkpoint_of(source.model), {}
    checkpoint = open_checkpoint(weights_in(Path(source.location)))
    return checkpoint, model_names(source.model, checkpoint.entries)


def _write_program(
    stage: Path,
    source: ModelSource,
    made: tuple[ConvertedModel, Deployed, Mapping[str, torch.Tensor]],
    report: Report,
    options: ConvertConfig,
) -> tuple[ReferenceOutputs, OnnxFile | None]:
    """Write the program, what it computes, and its ONNX form."""
    converted, graph, values = made
    if not options.program:
        return ReferenceOutputs({}, (), ""), None
    batch, names = source.batches[0], converted.traced.outputs
    train = options.mode == "train"
    program = export_program(graph, values, names, batch.args, batch.kwargs, train=train)
    torch.export.save(program, stage / PROGRAM)
    if source.release is not None:
        return ReferenceOutputs(
            {}, (), "its weights were streamed, so the program was written and not run"
        ), None
    call: Call = program.example_inputs or ((), {})
    reference = record_reference(program, source.model, (batch.args, batch.kwargs), call, names, options.seed)
    write_part(stage / REFERENCE, InMemory(REFERENCE, reference.tensors, {}))
    if not options.onnx:
        return reference, None
    given = input_names(source.model, batch.args, batch.kwargs)
    notes = onnx_notes(report, converted.traced, graph, program)
    about = about_report(report)
    return reference, write_onnx(program, stage / ONNX, flat_outputs(call), names, given, notes, about)


def _written(
    source: ModelSource, graph: Deployed, stage: Path, files: WeightFiles
) -> tuple[MappedWeights, dict[str, torch.Tensor]]:
    """The weights that were just written, mapped from their files; and those of each placeholder."""
    mapped = map_checkpoint(stage)
    by_parameter = {stored.parameter: mapped.tensors[name] for name, stored in files.tensors.items()}
    own = named_tensors(source.model)
    names = {id(tensor): name for name, tensor in own.items() if name in by_parameter}
    return mapped, {
        place.node: by_parameter[names[id(own[place.name])]]
        for place in graph.placeholders
        if place.name in own and id(own[place.name]) in names
    }


def _onnx_error(onnx: OnnxFile | None, reference: ReferenceOutputs) -> float | None:
    """Largest difference between ONNX Runtime's outputs and torch's.

    Raises:
        RunFailed: they are so far apart that the file means something else.
    """
    if onnx is None or not onnx.outputs:
        return None
    largest = 0.0
    for index, record in enumerate(reference.outputs):
        ours = reference.tensors[f"output[{index}]"]
        if not ours.isfinite().all():
            continue  # the audit said so, and the user wants the file all the same
        error, accuracy = compared(onnx.outputs[index], ours)
        if error is None or (accuracy is not None and accuracy < _ONNX_DB):
            what = "is not finite" if error is None else f"agrees to {accuracy:.0f} dB only"
            raise RunFailed(
                f"model.onnx computes something else than the program: {record.name} {what}",
                hint="leave out --onnx, and report it: torch's exporter, or ours, is wrong about an op",
            )
        largest = max(largest, error)
    return largest
