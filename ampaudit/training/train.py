"""Trains FP32, torch.amp and policies side by side, and reports what each does to the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.finding import FailOn
from ampaudit.report.model import ModelInfo
from ampaudit.report.training import TrainingReport
from ampaudit.run.audit import Progress, silent
from ampaudit.run.device import environment_of, pick_device
from ampaudit.source import ModelSource
from ampaudit.training.findings import training_report
from ampaudit.training.prepare import How
from ampaudit.training.variants import VariantSpec, train_variants

__all__ = ["MAX_BATCHES", "TrainSettings", "train_source"]

MAX_BATCHES = 256  # held at once; a longer run goes over them again


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How to train.

    Attributes:
        steps: of each run.
        policies: names or rule sets.
        dtype: ``float16`` or ``bfloat16``.
        device: ``auto``, ``cpu`` or ``cuda``.
        loss_scale: a profile's name or a number, for the policies' runs; by default each policy's own.
        every: one step of so many is watched.
        seed: of random numbers.
        fail_on: severity from which the exit code is 1.
        progress: told about each step.
    """

    steps: int = 100
    policies: Sequence[str | RuleSet] = ("ampaudit",)
    dtype: str = "float16"
    device: str = "auto"
    loss_scale: str | float | None = None
    every: int = 10
    seed: int = 0
    fail_on: FailOn = "error"
    progress: Progress | None = None


def train_source(source: ModelSource, settings: TrainSettings) -> TrainingReport:
    """Train a loaded source in each variant, and report how they compare with FP32.

    Raises:
        UsageError: nothing to train, or an impossible setting.
        InputError: no loss, or no gradient.
        ReferenceBroken: FP32's own loss is not finite.
    """
    if settings.steps < 1:
        raise UsageError("--steps must be at least 1")
    if source.kind in ("pt2", "converted") or source.release is not None:
        raise UsageError(f"{source.location} cannot be trained", hint="give the Python model")
    if not source.batches:
        raise InputError("there is no batch to train on", hint="make batches() yield at least one batch")
    device = pick_device(settings.device)
    specs = _specs(settings, device)
    variants, optimizer = train_variants(
        source,
        specs,
        steps=settings.steps,
        every=min(settings.every, max(settings.steps // 4, 1)),
        seed=settings.seed,
        device=device,
        progress=settings.progress or silent,
    )
    notes = []
    if len(source.batches) < settings.steps:
        notes.append(f"{len(source.batches)} batches for {settings.steps} steps: they were used again")
    return training_report(
        ModelInfo(source.location, source.kind, source.sha256),
        device.type,
        low_precision_format(settings.dtype).name,
        variants,
        seed=settings.seed,
        optimizer=optimizer,
        fail_on=settings.fail_on,
        judged=[spec.name for spec in specs if spec.name not in ("fp32", "torch.amp")],
        notes=notes,
    )


def _specs(settings: TrainSettings, device: torch.device) -> list[VariantSpec]:
    """FP32, autocast (CUDA's, emulated, where the device has none for the format), and each policy."""
    dtype = low_precision_format(settings.dtype).name
    native = device.type == "cuda" or dtype == "bfloat16"
    loaded = [p if isinstance(p, RuleSet) else load_policy(p) for p in settings.policies]
    policies = [rules.for_environment(environment_of(device)) for rules in loaded]
    specs = [VariantSpec("fp32", "plain FP32", None, dtype)]
    autocast = load_policy(f"torch-{device.type}" if native else "torch-cuda")
    if autocast.name not in {rules.name for rules in policies}:
        what = f"torch.autocast({device.type!r})" if native else "CUDA autocast, emulated"
        how: How = "autocast" if native else "graph"
        specs.append(
            VariantSpec("torch.amp", f"{what}, {dtype}", autocast, dtype, how=how, emulate=not native)
        )
    description = f"{'native' if native else 'emulated'}, {dtype}"
    specs += [
        VariantSpec(rules.name, description, rules, dtype, settings.loss_scale, emulate=not native)
        for rules in policies
    ]
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError("a policy is named twice")
    return specs
