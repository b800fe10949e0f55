"""Trains one model in several ways from the same start, on the same batches, one step of each in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ampaudit.core.config import Progress
from ampaudit.core.errors import InputError, ReferenceBroken, UsageError
from ampaudit.policy import RuleSet
from ampaudit.report.training import Health, Variant
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.loss import WithLoss, item_apart
from ampaudit.trace.structure import structural_copy
from ampaudit.training.divergence import diverged_at, smoothed_end
from ampaudit.training.prepare import How, is_pure, prepare
from ampaudit.training.scaler import LossScaler
from ampaudit.training.watch import TrainingMonitor, watch

__all__ = ["VariantSpec", "optimizer_of", "state_of", "train_variants"]


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One way to train.

    Attributes:
        name: as reports call it.
        how: what is run, for readers.
        rules: the policy; ``None`` for plain FP32.
        dtype: the 16-bit format.
        loss_scale: a profile, a fixed scale, or the policy's own.
        mode: through the graph, or under ``torch.autocast``.
        emulate: whether 16 bits are emulated.
    """

    name: str
    how: str
    rules: RuleSet | None
    dtype: str
    loss_scale: str | float | None = None
    mode: How = "graph"
    emulate: bool = False


class _Run:
    """One way under way: its model, optimizer, scaler, watch, and its own random numbers."""

    def __init__(self, way: VariantSpec, source: ModelSource, device: torch.device, every: int) -> None:
        self.way = way
        model = WithLoss(structural_copy(source.model), source.loss).to(device).train()
        with calling_user_code("optimizer(params)"):
            self.optimizer = optimizer_of(source, model)
        self.inner = model
        self.scaler: LossScaler | None = None
        self.model: nn.Module = model
        storage = "float32"
        if way.rules is not None:
            options = {"how": way.mode, "emulate": way.emulate, "loss_scale": way.loss_scale}
            made = prepare(model, self.optimizer, policy=way.rules, dtype=way.dtype, **options)  # type: ignore[arg-type]
            self.model, self.scaler = made.model, made.scaler
            storage = way.dtype if is_pure(way.rules) else storage
        self.watch: TrainingMonitor = watch(
            self.inner, self.optimizer, self.scaler, every=every, dtype=way.dtype
        )
        self.watch.storage = storage
        self.state = _random_state(device)
        self.seconds: list[float] = []
        self.peak: int | None = None

    def step(self, batch: Batch, number: int, device: torch.device) -> None:
        """Forward, backward, and the optimizer's step, or not."""
        _restore(self.state, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        item = item_apart(batch.args, batch.kwargs, batch.whole)
        loss = self.model(batch.args, batch.kwargs, item).loss
        self.watch.loss(loss)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self._refuse_no_gradient(number)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self._refuse_no_gradient(number)
            self.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated())
        self.seconds.append(time.perf_counter() - started)
        self.state = _random_state(device)
        if self.way.rules is None and not math.isfinite(float(loss.detach())):
            raise ReferenceBroken(
                f"the FP32 loss is {float(loss.detach())} in step {number}: there is nothing to compare with",
                hint="lower the learning rate, or look at the batch",
            )

    def _refuse_no_gradient(self, number: int) -> None:
        if number == 0 and all(p.grad is None for p in self.inner.parameters()):
            raise InputError(
                "no parameter gets a gradient: the loss depends on none that asks for one",
                hint="check requires_grad of the parameters, and detach() or no_grad() before the loss",
            )

    @property
    def bytes_held(self) -> int:
        """Of parameters, gradients and the optimizer's state, in the dtypes that this way stands for."""
        pure = self.watch.storage != "float32"
        tensors = [t for p in self.inner.parameters() for t in (p, p.grad) if t is not None]
        tensors += state_of(self.optimizer)
        return sum(t.numel() * (2 if pure and t.is_floating_point() else t.element_size()) for t in tensors)


def train_variants(
    source: ModelSource,
    ways: Sequence[VariantSpec],
    *,
    steps: int,
    every: int,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> tuple[list[Variant], str]:
    """Train; the first way is the FP32 one.

    Returns:
        A variant per way, and the optimizer's name.

    Raises:
        ReferenceBroken: FP32's loss is not finite.
        InputError: there is no loss, or no parameter gets a gradient.
    """
    batches = [batch.mapped(lambda tensor: tensor.to(device)) for batch in source.batches]
    runs: list[_Run] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for way in ways:
            torch.manual_seed(seed)
            runs.append(_Run(way, source, device, every))
        with ExitStack() as watching:
            for run in runs:
                watching.enter_context(run.watch)
            for number in range(steps):
                progress("training", number, steps)
                for run in runs:
                    run.step(batches[number % len(batches)], number, device)
        progress("training", steps, steps)
        metrics = [_metric(run, source, batches) for run in runs]
    healths = [run.watch.health() for run in runs]
    reference = [record.loss for record in healths[0].steps]
    variants = [_variant(*parts, reference) for parts in zip(runs, healths, metrics, strict=True)]
    return variants, type(runs[0].optimizer).__name__


def _variant(run: _Run, health: Health, metric: float | None, reference: list[float | None]) -> Variant:
    losses = [record.loss for record in health.steps]
    return Variant(
        name=run.way.name,
        how=run.way.how,
        health=health,
        diverged=None if run.way.rules is None else diverged_at(losses, reference),
        final_loss=smoothed_end(losses),
        metric=metric,
        # the first steps trace the model
        seconds=statistics.median(run.seconds[len(run.seconds) // 3 :]),
        bytes_held=run.bytes_held,
        peak_bytes=run.peak,
    )


def _metric(run: _Run, source: ModelSource, batches: Sequence[Batch]) -> float | None:
    """Mean of the file's metric over the first batches, with the trained weights in FP32."""
    if source.metric is None:
        return None
    model = structural_copy(source.model).to(next(run.inner.parameters()).device)
    inner: Any = run.inner
    trained = inner.inner.state_dict().items()
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in trained})
    model.eval()
    with torch.no_grad(), calling_user_code("metric(output, batch)"):
        outputs = ((model(*batch.args, **batch.kwargs), batch.whole) for batch in batches[:8])
        found = [float(source.metric(output, whole)) for output, whole in outputs]
    mean = sum(found) / len(found)
    return mean if math.isfinite(mean) else None


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer keeps."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def optimizer_of(source: ModelSource, model: nn.Module) -> torch.optim.Optimizer:
    """The model file's own, or AdamW.

    Raises:
        InputError, UsageError: there is nothing to train, or it is no optimizer that steps once a batch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("no parameter of the model asks for a gradient", hint="call requires_grad_()")
    made = source.optimizer(parameters) if source.optimizer is not None else None
    if made is None:
        made = torch.optim.AdamW(parameters, lr=1e-3)
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"optimizer(params) returned {type(made).__name__}", hint="return a torch optimizer")
    if isinstance(made, torch.optim.LBFGS):
        raise UsageError("LBFGS calls the model itself, and torch's GradScaler cannot scale that")
    return made


def _random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    own = torch.get_rng_state()
    return (own, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (own,)


def _restore(state: tuple[torch.Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
