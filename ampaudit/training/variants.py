"""Trains variants of one model from the same start on the same batches, one step of each in turn."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampaudit.core.config import Progress
from ampaudit.core.errors import InputError, ReferenceBroken
from ampaudit.policy import RuleSet
from ampaudit.report.training import Health, Variant
from ampaudit.run.device import generators_of, random_state, restore_random_state
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.structure import structural_copy
from ampaudit.training.divergence import diverged_at, smoothed_end
from ampaudit.training.module import KEEPS_ACTIVATIONS, MixedModule
from ampaudit.training.prepare import How, is_master_free
from ampaudit.training.step import (
    TrainingStep,
    make_optimizer,
    model_with_loss,
    optimizer_state,
    prepare_step,
)
from ampaudit.training.watch import watch

__all__ = ["VariantSpec", "train_variants"]

_METRIC_BATCHES = 8


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """The configuration of one variant.

    Attributes:
        name: as reports call it.
        description: what is run, for readers.
        rules: the policy; ``None`` for plain FP32.
        dtype: the 16-bit format.
        loss_scale: a profile, a fixed scale, or the policy's own.
        how: through the graph, or under ``torch.autocast``.
        emulate: whether 16 bits are emulated.
    """

    name: str
    description: str
    rules: RuleSet | None
    dtype: str
    loss_scale: str | float | None = None
    how: How = "graph"
    emulate: bool = False

    def training_step(self, source: ModelSource, device: torch.device) -> TrainingStep:
        """Build the model and its optimizer."""
        if self.rules is None:
            model = model_with_loss(source, device)
            return TrainingStep(model, make_optimizer(source, model))
        return prepare_step(
            source,
            device,
            self.rules,
            self.dtype,
            how=self.how,
            emulate=self.emulate,
            loss_scale=self.loss_scale,
        )

    @property
    def storage(self) -> str:
        """The dtype that the optimizer's parameters represent."""
        return self.dtype if self.rules is not None and is_master_free(self.rules) else "float32"


class _VariantRun:
    """A variant in training: its step, its monitor, and its own random numbers."""

    def __init__(self, spec: VariantSpec, source: ModelSource, device: torch.device, every: int) -> None:
        self.spec, self.device = spec, device
        self.training = spec.training_step(source, device)
        self.inner: Any = self.training.inner
        self.monitor = watch(
            self.inner, self.training.optimizer, self.training.scaler, every=every, dtype=spec.dtype
        )
        self.random_state = _random_state(device)
        self.seconds: list[float] = []
        self.peak: int | None = None

    def step(self, batch: Batch, number: int) -> None:
        """Take one step, and check after the first that there are gradients."""
        _restore(self.random_state, self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        self.training.optimizer.zero_grad()
        # what plain FP32 raises is the model's own
        with calling_user_code("the model") if self.spec.rules is None else nullcontext():
            loss = self.training.forward(batch).loss
        self.monitor.loss(loss)
        self.training.backward(loss)
        if number == 0 and all(p.grad is None for p in self.inner.parameters()):
            raise InputError(
                "no parameter gets a gradient: the loss depends on none that requires one",
                hint="check requires_grad of the parameters, and detach() or no_grad() before the loss",
            )
        self.training.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated(self.device))
        self.seconds.append(time.perf_counter() - started)
        self.random_state = _random_state(self.device)
        if self.spec.rules is None and not math.isfinite(float(loss.detach())):
            raise ReferenceBroken(
                f"the FP32 loss is {float(loss.detach())} in step {number}: there is nothing to compare with",
                hint="lower the learning rate, or inspect the batch",
            )

    @property
    def bytes_held(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state, in the dtypes of this variant."""
        low_precision = self.spec.storage != "float32"
        tensors = [t for p in self.inner.parameters() for t in (p, p.grad) if t is not None]
        tensors += optimizer_state(self.training.optimizer)
        return sum(
            t.numel() * (2 if low_precision and t.is_floating_point() else t.element_size()) for t in tensors
        )

    @property
    def keeps_activations(self) -> bool:
        """Return whether this run keeps activations that the model's code recomputes."""
        model = self.training.model
        return isinstance(model, MixedModule) and model.keeps_activations

    def result(self, health: Health, metric: float | None, reference: Sequence[float | None]) -> Variant:
        """Compare the run with the losses of FP32."""
        losses = [record.loss for record in health.steps]
        return Variant(
            name=self.spec.name,
            how=self.spec.description,
            health=health,
            diverged=None if self.spec.rules is None else diverged_at(losses, reference),
            final_loss=smoothed_end(losses),
            metric=metric,
            # the first steps trace the model
            seconds=statistics.median(self.seconds[len(self.seconds) // 3 :]),
            bytes_held=self.bytes_held,
            peak_bytes=self.peak,
        )


def train_variants(
    source: ModelSource,
    specs: Sequence[VariantSpec],
    *,
    steps: int,
    every: int,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> tuple[list[Variant], str, list[str]]:
    """Train each variant; the first is FP32.

    Returns:
        The variants, the optimizer's name, and notes.

    Raises:
        ReferenceBroken: FP32's loss is not finite.
        InputError: there is no loss, or no parameter gets a gradient.
    """
    batches = [batch.mapped(lambda tensor: tensor.to(device)) for batch in source.batches]
    runs: list[_VariantRun] = []
    with torch.random.fork_rng(**generators_of(device)):
        for spec in specs:
            torch.manual_seed(seed)
            runs.append(_VariantRun(spec, source, device, every))
        with ExitStack() as watching, warnings.catch_warnings():
            warnings.filterwarnings("ignore", KEEPS_ACTIVATIONS)  # a note of the report
            for run in runs:
                watching.enter_context(run.monitor)
            for number in range(steps):
                progress("training", number, steps)
                for run in runs:
                    run.step(batches[number % len(batches)], number)
        progress("training", steps, steps)
        metrics = [_metric(run, source, batches) for run in runs]
    healths = [replace(run.monitor.health(), storage=run.spec.storage) for run in runs]
    reference = [record.loss for record in healths[0].steps]
    variants = [
        run.result(health, metric, reference)
        for run, health, metric in zip(runs, healths, metrics, strict=True)
    ]
    keeping = [run.spec.name for run in runs if run.keeps_activations]
    notes = [f"{', '.join(keeping)}: {KEEPS_ACTIVATIONS}"] if keeping else []
    return variants, type(runs[0].training.optimizer).__name__, notes


def _metric(run: _VariantRun, source: ModelSource, batches: Sequence[Batch]) -> float | None:
    """Return the mean of the file's metric over the first batches, with the trained weights in FP32."""
    if source.metric is None:
        return None
    model = structural_copy(source.model).to(run.device)
    trained = run.inner.inner.state_dict().items()
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in trained})
    model.eval()
    with torch.no_grad(), calling_user_code("metric(output, batch)"):
        outputs = ((model(*batch.args, **batch.kwargs), batch.whole) for batch in batches[:_METRIC_BATCHES])
        values = [float(source.metric(output, whole)) for output, whole in outputs]
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None


def _random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    own = torch.get_rng_state()
    return (own,) if device.type == "cpu" else (own, random_state(device))


def _restore(state: tuple[torch.Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type != "cpu":
        restore_random_state(state[1], device)
