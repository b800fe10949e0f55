"""Converts a checkpoint by name, shape and value, without building a model or running code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from ampaudit.checkpoint import FLOAT_TYPES, MANIFEST
from ampaudit.checkpoint.open import PICKLED, Checkpoint, open_checkpoint
from ampaudit.checkpoint.safetensors import TensorEntry, type_name
from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_unchanged, staged_directory, states_of
from ampaudit.core.formats import NumberFormat, low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Session
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import Manifest, conversion_of, manifest_of, write_manifest
from ampaudit.export.weight_files import CASTABLE_TYPES, StorageDecision, WeightFiles, write_weights
from ampaudit.policy import OpFacts, RuleSet
from ampaudit.policy.decide import matches_any
from ampaudit.policy.schema import Cast
from ampaudit.report.conversion import Conversion


def is_checkpoint(location: str) -> bool:
    """Return whether a location holds weights without a model."""
    return location.endswith((".safetensors", ".safetensors.index.json", *PICKLED))


def convert_weights(
    path: Path, output: Path, options: ConvertConfig, session: Session = DEFAULT_SESSION
) -> Conversion:
    """Convert a checkpoint by name, shape and value, without building a model or running code.

    Raises:
        AuditError: See ``ampaudit.core.errors``; nothing is left behind.
    """
    options.check_output(output)
    needs_graph = options.onnx or options.dynamic or options.rescale or options.tune is not None
    if needs_graph or options.mode == "train" or options.io != "float32":
        raise UsageError(
            f"{path} has weights, but no graph",
            hint="convert the model for --mode train, --onnx, --dynamic, --rescale, --tune or --io",
        )
    read_files = states_of([path])
    checkpoint = open_checkpoint(path)
    options = options.loaded()
    rules = options.rules
    form = low_precision_format(options.dtype)
    decisions = _decide_by_name(checkpoint, rules, form)
    policy = rules.file.weights
    notes = ("only weights were converted: no model was run, so overflow in its layers was not checked",)
    with staged_directory(output, force=options.force, marker=MANIFEST) as stage:
        files = write_weights(
            checkpoint,
            decisions,
            stage,
            masters=options.masters,
            clip=policy.clip,
            measure=form,
            keep_overflowing=policy.storage == "float32",
            on_progress=session.on_progress,
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
        check_unchanged(read_files)
    conversion = conversion_to(output, checkpoint, files, manifest)
    return replace(conversion, exit_code=1 if conversion.overflow or conversion.broken else 0)


def _decide_by_name(checkpoint: Checkpoint, rules: RuleSet, form: NumberFormat) -> dict[str, StorageDecision]:
    """Decide for a checkpoint without its model.

    A policy that stores 16 bits is followed. For a policy that casts at each use, such as autocast, the
    operands of matrix products are stored in 16 bits: tensors of two or more dimensions, but not vectors
    (biases, norms, statistics). A policy that casts no matrix product changes nothing.

    Raises:
        UsageError: The policy has rules that need the model.
    """
    weights = rules.file.weights
    keep = [rule for rule in weights.keep if not rule.dtype or form.name in rule.dtype]
    if any(rule.model or rule.module or rule.attributes for rule in keep):
        raise UsageError(
            f"policy {rules.name!r} stores weights by the class of their module, and a checkpoint has none",
            hint="convert the model, or choose --policy half",
        )
    low_dtype = type_name(getattr(torch, form.name), form.name)
    stores_low = weights.storage == "lower"
    casts = stores_low or rules.decide(OpFacts("linear", "", form.name)).cast in (Cast.LOWER, Cast.ALLOW)
    castable = CASTABLE_TYPES if not stores_low or weights.casts == "float32" else FLOAT_TYPES

    def decide(entry: TensorEntry) -> StorageDecision:
        if entry.dtype not in castable:
            return StorageDecision(entry.dtype, "not a floating-point type that is cast")
        if any(matches_any(rule.parameter, entry.name) for rule in keep):
            return StorageDecision(entry.dtype, "the policy keeps it")
        if not casts:
            return StorageDecision(entry.dtype, "the policy casts no matrix product")
        if not stores_low and len(entry.shape) < 2:
            return StorageDecision(entry.dtype, "a vector: biases, norms and statistics stay")
        return StorageDecision(low_dtype, "the policy stores it in 16 bits")

    return {name: decide(entry) for name, entry in checkpoint.entries.items()}


def conversion_to(output: Path, checkpoint: Checkpoint, files: WeightFiles, manifest: Manifest) -> Conversion:
    """Summarize a conversion; fields that need an audit or ONNX stay empty."""
    entries = checkpoint.entries
    wide: dict[str, tuple[int, int, str]] = {}
    sizes = {name: replace(entries[name], dtype=tensor.dtype).size for name, tensor in files.tensors.items()}
    for name, tensor in files.tensors.items():
        if tensor.dtype in ("F32", "F64"):
            count, total, largest = wide.get(tensor.reason, (0, 0, name))
            largest = name if sizes[name] > entries[largest].size else largest
            wide[tensor.reason] = (count + 1, total + sizes[name], largest)
    rounded = {name for name, tensor in files.tensors.items() if tensor.master_dtype is not None}
    return replace(
        conversion_of(manifest, output),
        bytes_before=sum(entry.size for entry in entries.values()) - checkpoint.widened,
        bytes_after=sum(sizes.values()),
        stored=dict(Counter(tensor.dtype for tensor in files.tensors.values())),
        kept=wide,
        overflow={n: s.overflow for n, s in files.stats.items() if s.overflow and n in rounded},
        broken={n: s.broken for n, s in files.stats.items() if s.broken},
    )
