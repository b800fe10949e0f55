"""Trains FP32, torch.amp and policies side by side, and compares the runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Unpack

import torch

from ampaudit.audit.config import rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.core.config import with_options
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy
from ampaudit.report.model import ModelInfo
from ampaudit.report.training import TrainingReport
from ampaudit.run.device import environment_of, pick_device
from ampaudit.training.config import TrainConfig, TrainOptions
from ampaudit.training.findings import training_report
from ampaudit.training.prepare import How
from ampaudit.training.variants import VariantSpec, train_variants

__all__ = ["MAX_BATCHES", "train"]

MAX_BATCHES = 256  # held at once; a longer run goes over them again


@with_options(TrainConfig, TrainOptions)
def train(
    model: ModelLike,
    batches: Iterable[Inputs] | None = None,
    *,
    source: SourceConfig | None = None,
    config: TrainConfig | None = None,
    **options: Unpack[TrainOptions],
) -> TrainingReport:
    """Train in FP32, with torch.amp and under policies, from the same start on the same batches.

    Args:
        model: the model, which is not changed; or its location: a path, or ``package.module:factory``.
        batches: training batches; by default those of the model's file.
        source: how to load a model from its location: weights, inputs, ``trust`` ...
        config: the options as one record.
        **options: fields of ``TrainConfig``, which override those of ``config``.

    Returns:
        The report: the curves and findings of each run.

    Raises:
        UsageError: there is nothing to train, or a setting is impossible.
        InputError: there is no loss, or no parameter gets a gradient.
        ReferenceBroken: the FP32 loss is not finite.
    """
    chosen = TrainConfig.given(config, options)
    chosen.check()
    count = min(chosen.steps, MAX_BATCHES)
    loading = source or SourceConfig(seed=chosen.seed)
    opened = as_source(model, None, batches, loading.changed(batches=count, train=True), most=count)
    opened = replace(
        opened,
        loss=chosen.loss or opened.loss,
        optimizer=chosen.optimizer or opened.optimizer,
        metric=chosen.metric or opened.metric,
    )
    if opened.kind in ("pt2", "converted") or opened.release is not None:
        raise UsageError(f"{opened.location} cannot be trained", hint="give the Python model")
    if not opened.batches:
        raise InputError("there is no batch to train on", hint="make batches() yield at least one batch")
    device = pick_device(chosen.device)
    specs = _specs(chosen, device)
    variants, optimizer, notes = train_variants(
        opened,
        specs,
        steps=chosen.steps,
        every=min(chosen.every, max(chosen.steps // 4, 1)),
        seed=chosen.seed,
        device=device,
        progress=chosen.on_progress,
    )
    if len(opened.batches) < chosen.steps:
        notes.append(f"{len(opened.batches)} batches for {chosen.steps} steps: they were used again")
    return training_report(
        ModelInfo(opened.location, opened.kind, opened.sha256),
        device.type,
        low_precision_format(chosen.dtype).name,
        variants,
        seed=chosen.seed,
        optimizer=optimizer,
        fail_on=chosen.fail_on,
        judged=[spec.name for spec in specs if spec.name not in ("fp32", "torch.amp")],
        notes=notes,
    )


def _specs(config: TrainConfig, device: torch.device) -> list[VariantSpec]:
    """Return FP32, autocast (CUDA's, emulated if the device has none), and each policy."""
    dtype = low_precision_format(config.dtype).name
    native = device.type == "cuda" or (device.type == "cpu" and dtype == "bfloat16")
    environment = environment_of(device)
    policies = [rules_of(policy).for_environment(environment) for policy in config.policies]
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
        VariantSpec(rules.name, description, rules, dtype, config.loss_scale, emulate=not native)
        for rules in policies
    ]
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError("a policy is named twice")
    return specs
