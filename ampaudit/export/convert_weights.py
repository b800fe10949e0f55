"""``ampaudit convert`` of a checkpoint alone: no model, no graph, and nothing heavy to import."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampaudit.checkpoint.layout import MANIFEST
from ampaudit.checkpoint.open import PICKLED, Checkpoint, open_checkpoint
from ampaudit.core.errors import UsageError
from ampaudit.core.files import staged_directory
from ampaudit.core.formats import low_precision_format
from ampaudit.export.config import ConvertConfig
from ampaudit.export.directory import CheckpointSource, finish_directory
from ampaudit.export.storage import choose_by_name
from ampaudit.export.stream import Look, WeightFiles, write_weights
from ampaudit.report.conversion import Conversion
from ampaudit.trace.clipping import clipped

__all__ = ["conversion_of", "convert_weights", "is_checkpoint"]


def is_checkpoint(location: str) -> bool:
    """Whether a location is a checkpoint without a model: weights alone are converted."""
    return location.endswith((".safetensors", ".safetensors.index.json", *PICKLED))


def convert_weights(path: Path, output: Path, options: ConvertConfig) -> Conversion:
    """Convert a checkpoint alone, by name, shape and value: no model is built and no code is run.

    Raises:
        AuditError: see ``ampaudit.core.errors``; nothing is left behind.
    """
    options.check(output)
    if options.mode == "train" or options.onnx:
        raise UsageError(
            f"{path} has weights, but no graph", hint="convert the model for --mode train or --onnx"
        )
    checkpoint = open_checkpoint(path)
    options = options.loaded()
    rules = options.rules
    form = low_precision_format(options.dtype)
    choices = choose_by_name(checkpoint, rules, form)
    look = Look(form, keep_overflowing=rules.file.weights.storage == "float32")
    notes = (
        "only weights were converted: no model was run, so nothing is known about overflow in its layers",
    )
    limits = rules.file.weights.clip
    with staged_directory(output, force=options.force, ours=MANIFEST) as stage:
        change = None if limits is None else lambda piece: clipped(piece, limits)
        files = write_weights(checkpoint, choices, stage, masters=options.masters, change=change, look=look)
        origin = CheckpointSource(str(path), None, "weights", options, 0, limits)
        manifest = finish_directory(stage, origin, files, notes, (), None)
    made = conversion_of(output, checkpoint, files, options, str(path))
    sizes = {name: record.size for name, record in manifest.files.items()}
    return replace(made, files=sizes, notes=notes, exit_code=1 if made.overflow or made.broken else 0)


def conversion_of(
    output: Path, checkpoint: Checkpoint, files: WeightFiles, options: ConvertConfig, location: str
) -> Conversion:
    """What the written weights come to; what only a run can tell is left empty."""
    entries = checkpoint.entries
    stored: dict[str, int] = {}
    kept: dict[str, tuple[int, int, str]] = {}
    after = 0
    for name, tensor in files.tensors.items():
        size = replace(entries[name], dtype=tensor.dtype).size
        after += size
        stored[tensor.dtype] = stored.get(tensor.dtype, 0) + 1
        if tensor.dtype in ("F32", "F64"):
            count, total, largest = kept.get(tensor.reason, (0, 0, name))
            largest = name if size > entries[largest].size else largest
            kept[tensor.reason] = (count + 1, total + size, largest)
    rounded = {name for name, tensor in files.tensors.items() if tensor.master_dtype is not None}
    return Conversion(
        source=location,
        output=str(output),
        policy=options.rules.name,
        dtype=options.dtype,
        mode=options.mode,
        verdict=None,
        exit_code=0,
        bytes_before=sum(entry.size for entry in entries.values()),
        bytes_after=after,
        stored=stored,
        kept=kept,
        overflow={n: s.overflow for n, s in files.surveys.items() if s.overflow and n in rounded},
        broken={n: s.broken for n, s in files.surveys.items() if s.broken},
        masters=options.masters,
        outputs=(),
        onnx_casts=None,
        onnx_error=None,
        files={},
        notes=(),
    )
