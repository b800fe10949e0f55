"""Converts a checkpoint without its model or a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampaudit.checkpoint.layout import MANIFEST
from ampaudit.checkpoint.open import PICKLED, Checkpoint, open_checkpoint
from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_unchanged, staged_directory, states_of
from ampaudit.core.formats import low_precision_format
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import Manifest, manifest_of, write_manifest
from ampaudit.export.weight_files import WeightFiles, decide_by_name, write_weights
from ampaudit.report.conversion import Conversion

__all__ = ["conversion_of", "convert_weights", "is_checkpoint"]


def is_checkpoint(location: str) -> bool:
    """Return whether a location holds weights without a model."""
    return location.endswith((".safetensors", ".safetensors.index.json", *PICKLED))


def convert_weights(path: Path, output: Path, options: ConvertConfig) -> Conversion:
    """Convert a checkpoint by name, shape and value, without building a model or running code.

    Raises:
        AuditError: see ``ampaudit.core.errors``; nothing is left behind.
    """
    options.check_output(output)
    if options.mode == "train" or options.onnx or options.dynamic or options.rescale:
        raise UsageError(
            f"{path} has weights, but no graph",
            hint="convert the model for --mode train, --onnx, --dynamic or --rescale",
        )
    read = states_of([path])
    checkpoint = open_checkpoint(path)
    options = options.loaded()
    rules = options.rules
    form = low_precision_format(options.dtype)
    decisions = decide_by_name(checkpoint, rules, form)
    policy = rules.file.weights
    notes = (
        "only weights were converted: no model was run, so nothing is known about overflow in its layers",
    )
    with staged_directory(output, force=options.force, ours=MANIFEST) as stage:
        files = write_weights(
            checkpoint,
            decisions,
            stage,
            masters=options.masters,
            clip=policy.clip,
            measure=form,
            keep_overflowing=policy.storage == "float32",
            on_progress=options.on_progress,
        )
        manifest = manifest_of(
            options,
            files,
            kind="weights",
            source=str(path),
            source_sha256=None,
            seed=0,
            clip=policy.clip,
            notes=notes,
        )
        manifest = write_manifest(stage, manifest)
        check_unchanged(read)
    conversion = conversion_of(output, checkpoint, files, manifest)
    return replace(conversion, exit_code=1 if conversion.overflow or conversion.broken else 0)


def conversion_of(output: Path, checkpoint: Checkpoint, files: WeightFiles, manifest: Manifest) -> Conversion:
    """Summarize a conversion; fields that need an audit or ONNX stay empty."""
    entries = checkpoint.entries
    stored: dict[str, int] = {}
    wide: dict[str, tuple[int, int, str]] = {}
    after = 0
    for name, tensor in files.tensors.items():
        size = replace(entries[name], dtype=tensor.dtype).size
        after += size
        stored[tensor.dtype] = stored.get(tensor.dtype, 0) + 1
        if tensor.dtype in ("F32", "F64"):
            count, total, largest = wide.get(tensor.reason, (0, 0, name))
            largest = name if size > entries[largest].size else largest
            wide[tensor.reason] = (count + 1, total + size, largest)
    rounded = {name for name, tensor in files.tensors.items() if tensor.master_dtype is not None}
    return Conversion(
        source=manifest.source,
        output=str(output),
        policy=manifest.policy,
        dtype=manifest.dtype,
        mode=manifest.mode,
        verdict=None,
        exit_code=0,
        bytes_before=sum(entry.size for entry in entries.values()) - checkpoint.widened,
        bytes_after=after,
        stored=stored,
        kept=wide,
        overflow={n: s.overflow for n, s in files.stats.items() if s.overflow and n in rounded},
        broken={n: s.broken for n, s in files.stats.items() if s.broken},
        masters=manifest.masters,
        outputs=manifest.outputs,
        onnx_casts=None,
        onnx_error=None,
        files={name: record.size for name, record in manifest.files.items()},
        notes=manifest.notes,
        shapes=manifest.shapes,
    )
