"""Audits a model, and writes the converted checkpoint if it passes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ampaudit.audit.advice.residual_stream import AttributeChange
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.audit.rescale import rescaled_model
from ampaudit.audit.scan import Audited, audit_policies
from ampaudit.checkpoint import MANIFEST, ONNX, PLAN, PROGRAM, REFERENCE, REPORT, SINGLE
from ampaudit.checkpoint.open import ChangedPart, Checkpoint, map_checkpoint
from ampaudit.checkpoint.safetensors import InMemory, MappedWeights, write_part
from ampaudit.core.config import path_argument, with_options
from ampaudit.core.errors import SourceError, UsageError, WeightsError
from ampaudit.core.files import check_unchanged, staged_directory, states_of
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session
from ampaudit.core.source_config import CONFIG_FILE, SourceConfig
from ampaudit.core.text import listed
from ampaudit.core.untrusted import describe, open_regular
from ampaudit.export.config import ConvertConfig
from ampaudit.export.dynamic import DynamicShapes, compare_shapes, retrace
from ampaudit.export.fold import FoldedGraph, fold_casts, folded_weights, planned_dtypes
from ampaudit.export.manifest import manifest_of, write_manifest, write_table
from ampaudit.export.plan_file import plan_rules
from ampaudit.export.program import (
    ExampleCall,
    ReferenceOutputs,
    digest_of_tensors,
    export_program,
    flat_outputs,
    names_of_inputs,
    record_reference,
    save_program,
)
from ampaudit.export.weight_files import (
    StorageDecision,
    WeightFiles,
    decide_as_planned,
    write_weights,
)
from ampaudit.export.weights import conversion_to
from ampaudit.render.json import to_json
from ampaudit.render.render import keeping
from ampaudit.report.conversion import Conversion, ProgramShapes
from ampaudit.report.model import Report
from ampaudit.run.program import draws
from ampaudit.source import Batch, ModelSource
from ampaudit.source.model_config import read_raw_config, with_stored_dtype
from ampaudit.source.streamed import model_names, open_weights
from ampaudit.trace.converted import ConvertedModel, identity
from ampaudit.trace.fake_model import kept_by_author, named_tensors
from ampaudit.trace.graph import is_idle_dropout
from ampaudit.trace.isolation import isolated
from ampaudit.trace.path.recorder import refuse_path
from ampaudit.trace.values import torch_dtype
from ampaudit.tuning.tune import tuned_rules

if TYPE_CHECKING:
    from ampaudit.export.onnx.torch_export import ExportedOnnx

# weight files of any format; they are not copied, since they would contradict the converted weights
_WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".pt2", ".gguf", ".ot"),
    *(".tflite", ".data", ".npz", ".mlmodel"),
}
_OWN_FILES = {MANIFEST, PLAN, REPORT}
_MAX_LISTED = 4  # modules in a note


@with_options(ConvertConfig)
@isolated()
def convert(
    model: ModelLike,
    inputs: Inputs | None = None,
    output: str | Path = "",
    *,
    source: SourceConfig | None = None,
    config: ConvertConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> tuple[Report, Conversion | None]:
    """Audit a model, and write its converted checkpoint if nothing breaks.

    Args:
        model: Model in the mode to audit (``train()`` or ``eval()``), which is not changed; or its location:
            a path, or ``package.module:factory``.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs; ``None`` for
            those of the model's file.
        output: Directory to write.
        source: Options to load a model from its location: weights, inputs, ``trust`` ...
        config: Options as one record.
        session: Context of the call and of its audits.
        **options: Fields of ``ConvertConfig``, which override those of ``config``.

    Returns:
        The report, and the conversion, or ``None`` if findings at or above ``fail_on`` prevented it.

    Raises:
        AuditError: See ``ampaudit.core.errors``; nothing is left behind.
    """
    config, directory = ConvertConfig.merged(config, options), path_argument(output, "output")
    config.check_output(directory)
    opened = as_source(model, inputs, options=source or SourceConfig(seed=config.seed))
    _refuse(opened, config)
    if config.tune is not None:
        config = config.changed(min_sqnr=max(config.tune, config.min_sqnr))
    if opened.kind == "onnx":
        from ampaudit.export.onnx.convert import convert_onnx

        return convert_onnx(opened, directory, config, session)
    opened = replace(opened, batches=tuple(map(_without_repeats, opened.batches)))
    shapes = DynamicShapes.parse(config.dynamic, opened.model, opened.batches[0])
    read_files = (*opened.files, *states_of([config.weights] if config.weights is not None else []))
    audited, rescaling = None, None
    if config.rescale:
        opened, audited, rescaling = audit_rescaled(opened, config.loaded(), session)
    if config.tune is not None:
        rules = tuned_rules(opened, config.dtype, config.tune, config, session)
        config = config.changed(policy=rules)
    config = config.loaded()
    if audited is None or config.tune is not None:
        (audited,) = audit_policies(opened, [config.rules], ScanConfig.of(config), session)
    if rescaling is not None:
        notes = (*audited.report.notes, *rescaling.notes)
        audited = replace(audited, report=replace(audited.report, notes=notes))
    if audited.report.exit_code:
        return audited.report, None
    plan = _plan(opened, audited, config, rescaling, shapes)
    with (
        keeping(audited.report),
        staged_directory(directory, force=config.force, marker=MANIFEST) as stage,
    ):
        conversion = _write(plan, stage, directory, session.on_progress)
        check_unchanged(read_files)
    return audited.report, conversion


def _without_repeats(batch: Batch) -> Batch:
    """Copy tensors that a batch gives twice: a trace takes them for one, but a program has two inputs."""
    ids: set[int] = set()

    def copy_repeated(tensor: torch.Tensor) -> torch.Tensor:
        is_repeated = id(tensor) in ids
        ids.add(id(tensor))
        return tensor.detach().clone() if is_repeated else tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, copy_repeated, (batch.args, batch.kwargs))
    return replace(batch, args=args, kwargs=kwargs)


def _refuse(source: ModelSource, config: ConvertConfig) -> None:
    """Reject models that are converted already, and options that do not apply to a model."""
    if config.io != "float32" and source.kind != "onnx":
        raise UsageError(f"--io {config.io} is for .onnx files", hint="leave out --io")
    if config.onnx and source.release is not None:
        raise UsageError("--onnx holds all weights in memory", hint="leave out --stream or --onnx")
    if source.kind == "converted":
        is_program = (Path(source.location) / PROGRAM).is_file()
        hint = "--to float32 undoes it" if is_program else "convert the original again"
        raise SourceError(f"{source.location} is converted already", hint=hint)


class _Plan(NamedTuple):
    """What to write: the audited model, the graph of its program, and the dtype of each weight."""

    source: ModelSource
    audited: Audited
    config: ConvertConfig
    rescaling: Rescaling | None
    shapes: DynamicShapes
    converted: ConvertedModel
    graph: FoldedGraph
    checkpoint: Checkpoint
    decisions: Mapping[str, StorageDecision]


def _plan(
    source: ModelSource,
    audited: Audited,
    config: ConvertConfig,
    rescaling: Rescaling | None,
    shapes: DynamicShapes,
) -> _Plan:
    """Trace again with open dimensions, if any; fold casts into the weights, and decide their dtypes."""
    converted = audited.audit.converted
    refuse_path(converted.traced, "a converted program")
    if config.dynamic:
        batch = shapes.traceable(source.batches[0])
        source = replace(source, batches=(batch,))
        converted = retrace(source, audited, batch, config, shapes.dimensions())
    graph = fold_casts(converted, config.mode)
    storage = graph if config.mode == "inference" else fold_casts(converted, "inference")
    checkpoint, names = _checkpoint(source, config, rescaling)
    decisions = decide_as_planned(checkpoint, planned_dtypes(source.model, storage), names)
    return _Plan(source, audited, config, rescaling, shapes, converted, graph, checkpoint, decisions)


def _write(plan: _Plan, stage: Path, directory: Path, on_progress: Progress) -> Conversion:
    """Write everything into a staging directory; ``directory`` is its final location."""
    source, audited, config, converted = plan.source, plan.audited, plan.config, plan.converted
    notes = [*source.notes, *converted.traced.notes]
    if source.kind == "huggingface":
        copy_companions(Path(source.location), stage, directory)
        notes += set_dtype(stage, source.model, plan.decisions, config.dtype)
    notes += plan.rescaling.set_attributes(stage, source) if plan.rescaling is not None else ()
    clip = converted.traced.clip
    files = write_weights(
        plan.checkpoint, plan.decisions, stage, masters=config.masters, clip=clip, on_progress=on_progress
    )
    (stage / PLAN).write_text(
        plan_rules(audited.audit.converted.traced, audited.rules, source.location), "utf-8"
    )
    (stage / REPORT).write_text(to_json(audited.report), "utf-8")
    mapped, ready = _map_written(source, plan.graph, stage, files) if source.release else (None, {})
    weights = folded_weights(converted, plan.graph, ready)
    on_progress("exporting the program", 0, 0)
    with mapped.dropping() if mapped is not None else nullcontext():
        program = _write_program(plan, weights, stage)
    tensors = program.reference.tensors.items()
    inputs = [tensor for name, tensor in tensors if name.startswith("input")]
    manifest = manifest_of(
        config,
        files,
        kind="model",
        source=source.location,
        source_sha256=source.sha256,
        seed=config.seed,
        clip=clip,
        notes=[*notes, *program.notes],
        inputs_sha256=digest_of_tensors(inputs) if inputs else None,
        outputs=program.reference.outputs,
        shapes=program.shapes,
    )
    return replace(
        conversion_to(directory, plan.checkpoint, files, write_manifest(stage, manifest)),
        verdict=audited.report.verdict,
        onnx_casts=program.onnx.casts if program.onnx is not None else None,
        onnx_error=program.onnx_error,
        inputs=source.inputs,
        gaps=audited.report.gaps,
    )


class _ProgramFiles(NamedTuple):
    """The reference outputs of the written program, and its ONNX form; empty without a program."""

    reference: ReferenceOutputs = ReferenceOutputs({}, (), "")
    onnx: ExportedOnnx | None = None
    onnx_error: float | None = None
    shapes: ProgramShapes | None = None
    notes: tuple[str, ...] = ()


def _checkpoint(
    source: ModelSource, options: ConvertConfig, rescaling: Rescaling | None
) -> tuple[Checkpoint, dict[str, str]]:
    """Open the checkpoint to convert, and map its names to the model's where they differ.

    Weight files are preferred to the model in memory, since they may hold tensors that the model lacks.
    """
    if options.weights is None and source.kind != "huggingface":
        return _state_dict_of(source.model), {}
    checkpoint = open_weights(Path(source.location), options.weights)
    if options.weights is not None and not source.model.state_dict().keys() >= checkpoint.entries.keys():
        return _state_dict_of(source.model), {}  # the model's load_state_dict renames them
    names = model_names(source.model, checkpoint.entries) if options.weights is None else {}
    return (rescaling.apply(checkpoint, names) if rescaling is not None else checkpoint), names


def _state_dict_of(model: nn.Module) -> Checkpoint:
    """Return a model's state_dict with tied tensors stored once; their other names become metadata.

    This is the layout of ``safetensors.torch.save_model``, which ``load_model`` reads.
    """
    tensors: dict[str, torch.Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    metadata = {"format": "pt"}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue  # the extra state of a module
        key = identity(tensor)
        if tensor.numel() and key in first:
            metadata[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor
    return Checkpoint(Path(SINGLE), (InMemory(SINGLE, tensors, metadata),), None, {})


def _write_program(plan: _Plan, weights: Mapping[str, torch.Tensor], stage: Path) -> _ProgramFiles:
    """Write the program, its reference outputs, and its ONNX form; compare them."""
    source, config, shapes, batch = plan.source, plan.config, plan.shapes, plan.source.batches[0]
    if not config.program:
        return _ProgramFiles()
    paths = plan.converted.traced.paths
    program = export_program(
        plan.graph,
        weights,
        paths,
        batch.args,
        batch.kwargs,
        train=config.mode == "train",
        dimensions=shapes.dimensions() if config.dynamic else None,
    )
    save_program(program, stage / PROGRAM)
    if source.release is not None:
        note = "its weights were streamed, so the program was written and not run"
        return _ProgramFiles(shapes=shapes.describe(program, ()), notes=(note,))
    call: ExampleCall = program.example_inputs or ((), {})
    model_call = batch.args, batch.kwargs
    reference = record_reference(program, source.model, model_call, call, list(paths), config.seed)
    write_part(stage / REFERENCE, InMemory(REFERENCE, reference.tensors, {}))
    onnx = None
    if config.onnx:
        from ampaudit.export.onnx.torch_export import metadata_of, write_onnx

        onnx = write_onnx(
            program,
            stage / ONNX,
            flat_outputs(call),
            input_names=names_of_inputs(source.model, batch.args, batch.kwargs),
            output_names=list(paths),
            metadata=metadata_of(plan.audited.report, plan.converted.traced, plan.graph, program),
            axis_names=shapes.axis_names,
        )
    compared = onnx if not _draws_numbers(program) else None
    error = compared.max_error(reference) if compared is not None else None
    verified: list[Mapping[str, int]] = []
    if config.dynamic:
        path = stage / ONNX if compared is not None and compared.outputs else None
        verified, largest = compare_shapes(program, source, plan.audited, config, shapes, path)
        error = max(error, largest) if error is not None else None
    notes = tuple(text for text in (reference.note, onnx.note if onnx else "") if text)
    return _ProgramFiles(reference, onnx, error, shapes.describe(program, verified), notes)


def _draws_numbers(program: ExportedProgram) -> bool:
    """Return whether an op of the program draws random numbers, which ONNX Runtime draws otherwise."""
    calls = (node for node in program.graph.nodes if isinstance(node.target, OpOverload))
    return any(draws(node.target, node.args, node.kwargs) and not is_idle_dropout(node) for node in calls)


def _map_written(
    source: ModelSource, graph: FoldedGraph, stage: Path, files: WeightFiles
) -> tuple[MappedWeights, dict[str, torch.Tensor]]:
    """Map the newly written weights, and look up those of each placeholder."""
    mapped = map_checkpoint(stage)
    by_parameter = {stored.parameter: mapped.tensors[name] for name, stored in files.tensors.items()}
    parameters = named_tensors(source.model)
    names = {id(tensor): name for name, tensor in parameters.items() if name in by_parameter}
    return mapped, {
        place.node: by_parameter[names[id(parameters[place.name])]]
        for place in graph.placeholders
        if place.name in parameters and id(parameters[place.name]) in names
    }


@dataclass(frozen=True, slots=True)
class Rescaling:
    """The changes of ``--rescale``."""

    powers: Mapping[str, int]  # exponent of the factor of two, under all names of each weight
    attributes: tuple[AttributeChange, ...]  # numbers of modules, such as an eps
    notes: tuple[str, ...]  # on the changes, or on why there are none

    def apply(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
        """Return the checkpoint of the original weights with these changes."""
        files = {name: part.label for part in checkpoint.parts for name in part.entries}

        def scaled(name: str, piece: torch.Tensor) -> torch.Tensor:
            power = self.powers.get(names.get(name, name), 0)
            product = piece * 2.0**power if power else piece
            if power and not torch.equal(product * 2.0**-power, piece):
                what = f"{describe(files[name])}: {describe(name)!r} times 2^{power} is not exact"
                raise WeightsError(what, hint="leave out --rescale")
            return product

        return replace(checkpoint, parts=tuple(ChangedPart(part, scaled) for part in checkpoint.parts))

    def set_attributes(self, directory: Path, source: ModelSource) -> tuple[str, ...]:
        """Set the attributes in the configuration of a Hugging Face directory.

        Returns:
            Notes for the user, including on the attributes that their code must set.
        """
        if source.kind == "huggingface" and set_numbers(directory, source.model, self.attributes):
            return self.notes
        return (*self.notes, *self._attributes_to_set())

    def _attributes_to_set(self) -> Iterator[str]:
        for name, old, new in dict.fromkeys((each.name, each.old, each.new) for each in self.attributes):
            paths = [a.module for a in self.attributes if (a.name, a.old, a.new) == (name, old, new)]
            where = listed([path or "the top module" for path in paths], _MAX_LISTED)
            yield f"with these weights, set {name} of {where} to {new!r} (it is {old!r} in the code)"


def audit_rescaled(
    source: ModelSource, config: ConvertConfig, session: Session
) -> tuple[ModelSource, Audited, Rescaling]:
    """Audit a model, and rescale each stream that overflows or is promoted for its range.

    Raises:
        AuditError: See ``audit_policies``.
    """
    if source.release is not None:
        raise UsageError("--rescale holds all weights in memory", hint="leave out --stream or --rescale")
    rescaled = rescaled_model(source, config.rules, ScanConfig.of(config), session)
    source, audited, changes = rescaled.source, rescaled.audited, rescaled.changes
    notes = [f"rescaled: {change.change}" for change in changes]
    notes += [
        f"--rescale: nothing at {site}: {reason}" for site, reason in list(rescaled.refused.items())[:1]
    ]
    if not notes:
        notes = ["--rescale: nothing overflows, so no weight was rescaled"]
    tensors = named_tensors(source.model)
    powers: dict[tuple[object, ...], int] = {}
    for change in changes:
        for name, power in change.weights.items():
            powers[identity(tensors[name])] = powers.get(identity(tensors[name]), 0) + power
    every = {name: powers[identity(t)] for name, t in tensors.items() if identity(t) in powers}
    attributes = tuple(each for change in changes for each in change.attributes)
    return source, audited, Rescaling(every, attributes, tuple(notes))


def copy_companions(source: Path, target: Path, output: Path) -> None:
    """Copy everything except weights, such as configuration and tokenizer, with subdirectories.

    Converted directories inside the source are not copied: neither ``output`` nor earlier ones.

    Raises:
        SourceError: A link leads out of the source, so its copy would publish a file from elsewhere.
    """
    allowed = [source.resolve()]
    if allowed[0].parent.name == "snapshots":  # files in the cache of Hugging Face are links to blobs
        allowed.append(allowed[0].parent.parent / "blobs")
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if (
            path.resolve().is_relative_to(output.resolve())
            or any(part.startswith(".") for part in relative.parts)
            or any((source / parent / MANIFEST).is_file() for parent in relative.parents[:-1])
            or not path.is_file()
            or path.suffix in _WEIGHT_SUFFIXES
            or path.name.endswith(".index.json")
            or str(relative) in _OWN_FILES
        ):
            continue
        place = target / relative
        if not any(path.resolve().is_relative_to(directory) for directory in allowed):
            raise SourceError(
                f"{path} is a link to {path.resolve()}, outside of the model's directory",
                hint="put the file itself there, or remove the link",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(path, SourceError), "rb") as file, place.open("xb") as copy:
            shutil.copyfileobj(file, copy)


def set_dtype(
    directory: Path, model: nn.Module, decisions: Mapping[str, StorageDecision], dtype: str
) -> tuple[str, ...]:
    """Set the dtype in config.json so that ``from_pretrained`` narrows no parameter that the plan keeps wide.

    ``from_pretrained`` loads all parameters in one dtype, except those of modules that the model's class
    keeps in FP32. So this is the 16-bit format only if the plan uses no other parameter in float32. Tensors
    that the model lacks do not count.

    Returns:
        Notes for the user.
    """
    config, names = read_raw_config(directory), model.state_dict().keys()
    is_kept = kept_by_author(model, torch_dtype(low_precision_format(dtype)))
    float32 = [
        name
        for name, decision in decisions.items()
        if (decision.dtype == "F32" or decision.used_in_float32)
        and (place := decision.parameter or name) in names
        and not is_kept(place)
    ]
    if "torch_dtype" not in config:
        config.setdefault("dtype")
    config = with_stored_dtype(config, dtype if not float32 else "float32")
    write_table(directory / CONFIG_FILE, config)
    if not float32:
        return ()
    return (
        f"from_pretrained has one dtype for the whole model and loads this directory in float32, since "
        f"{len(float32)} tensors need it: run it under torch.autocast, or use model.pt2; --policy half or "
        "keep-fp32-modules makes a directory that loads in 16 bits",
    )


def set_numbers(directory: Path, model: nn.Module, changes: Collection[AttributeChange]) -> bool:
    """Set numbers of modules, such as an eps, in config.json, and return whether all of them are set.

    A number is set only if exactly one key has it, and every module that had it changes.
    """
    config = read_raw_config(directory)
    values = {(each.old, each.new) for each in changes}
    if len(values) != 1:
        return not values
    ((old, new),) = values
    keys = [key for key, value in config.items() if value == old and isinstance(value, float)]
    numbers = {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    }
    changed = {place for place, value in numbers.items() if value == new}
    if len(keys) != 1 or old in numbers.values() or changed != {(each.module, each.name) for each in changes}:
        return False
    config[keys[0]] = new
    write_table(directory / CONFIG_FILE, config)
    return True
