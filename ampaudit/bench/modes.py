"""The ways to run a model that are compared: each built from a copy of it, so that none disturbs another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ampaudit.audit.plan import trace_under
from ampaudit.bench.batches import moved, resized
from ampaudit.bench.devices.catalogue import Device
from ampaudit.core.formats import NumberFormat
from ampaudit.export.fold import fold_casts, folded_weights
from ampaudit.export.program import GraphModel
from ampaudit.policy import RuleSet, load_policy
from ampaudit.run.guards import exact_float32, tf32
from ampaudit.source import Batch, ModelSource
from ampaudit.trace.converted import convert
from ampaudit.trace.loss import WithLoss, item_apart
from ampaudit.trace.storage import stored_dtypes
from ampaudit.trace.structure import structural_copy
from ampaudit.training.prepare import is_master_free, prepare
from ampaudit.training.variants import make_optimizer

__all__ = ["BenchSetup", "ModeRunner", "NotSupported", "build_mode", "with_batch_size"]

_STORED = {"half": torch.float16, "bf16": torch.bfloat16}


class NotSupported(Exception):
    """A mode that this device or model does not have; the text says why."""


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """What is measured, and how.

    Attributes:
        source: the model with its batches, already of the wanted size.
        device: where.
        form: the 16-bit format of autocast and of conversions.
        rules: the policy of conversions.
        train: whether a step is a training step.
        seed: of random numbers.
        target: a device that estimates are for; autocast then stands for that device's.
    """

    source: ModelSource
    device: torch.device
    form: NumberFormat
    rules: RuleSet
    train: bool
    seed: int
    target: Device | None = None

    @property
    def low_dtype(self) -> torch.dtype:
        """The 16-bit format as torch calls it."""
        dtype: torch.dtype = getattr(torch, self.form.name)
        return dtype


def with_batch_size(subject: BenchSetup, size: int) -> BenchSetup:
    """The same with another batch size."""
    batch = resized(subject.source.batches[0], size)
    return replace(subject, source=replace(subject.source, batches=(batch,)))


@dataclass
class ModeRunner:
    """A mode that can be run.

    Attributes:
        how: what is run, for readers.
        model: with its weights, on the device.
        around: a context of each forward pass.
        dtype: of floating-point inputs; ``None`` leaves them.
        optimizer: of a training step.
        scaler: its GradScaler, if it has one.
        masters: names of parameters that are FP32 masters of 16-bit copies.
    """

    how: str
    model: nn.Module
    around: Callable[[], contextlib.AbstractContextManager[Any]]
    dtype: torch.dtype | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None
    masters: frozenset[str] = frozenset()

    def forward(self, batch: Batch) -> Any:
        """The model's outputs, without gradients."""
        with torch.no_grad(), self.around():
            if isinstance(getattr(self.model, "original", self.model), WithLoss):
                return self.model(batch.args, batch.kwargs, _item(batch)).output
            return self.model(*batch.args, **batch.kwargs)

    def step(self, batch: Batch) -> torch.Tensor | None:
        """One forward pass; or with an optimizer forward, backward and update, and the loss."""
        if self.optimizer is None:
            self.forward(batch)
            return None
        with self.around():
            loss: torch.Tensor = self.model(batch.args, batch.kwargs, _item(batch)).loss
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _item(batch: Batch) -> Any:
    return item_apart(batch.args, batch.kwargs, batch.whole)


def build_mode(mode: str, subject: BenchSetup) -> ModeRunner:
    """A mode, ready to run.

    Raises:
        NotSupported: the device does not have it.
        AuditError: the model cannot be traced, or has no loss.
    """
    if mode in ("converted", "converted+compile"):
        return _converted(subject, compiled=mode.endswith("compile"))
    model, device = _copy(subject), subject.device
    if mode == "tf32":
        _check_tf32(device)
        return _finished(ModeRunner("float32, products in TF32", model, lambda: tf32(allowed=True)), subject)
    if mode == "autocast":
        return _autocast(model, subject)
    if mode in _STORED:
        dtype = _STORED[mode]
        how = f"everything in {str(dtype).removeprefix('torch.')}"
        return _finished(ModeRunner(how, model.to(dtype), contextlib.nullcontext, dtype), subject)
    return _finished(ModeRunner("float32, TF32 off", model, exact_float32), subject)


def _copy(subject: BenchSetup) -> nn.Module:
    model = structural_copy(subject.source.model).to(subject.device)
    return WithLoss(model, subject.source.loss).train() if subject.train else model.eval()


def _finished(built: ModeRunner, subject: BenchSetup) -> ModeRunner:
    if subject.train:
        built.optimizer = make_optimizer(subject.source, built.model)
    return built


def _autocast(model: nn.Module, subject: BenchSetup) -> ModeRunner:
    kind, dtype = subject.device.type, subject.low_dtype
    if subject.target is not None and subject.target.capability is not None and kind != "cuda":
        built = _converted(replace(subject, rules=load_policy("torch-cuda")), compiled=False, folded=False)
        built.how = (
            f"the casts of torch.autocast('cuda', {subject.form.name}), in a graph: there is no GPU here"
        )
        return built
    try:
        torch.autocast(kind, dtype=dtype)
    except RuntimeError as error:
        raise NotSupported(str(error)) from error
    built = ModeRunner(
        f"torch.autocast({kind!r}, {subject.form.name})", model, lambda: torch.autocast(kind, dtype=dtype)
    )
    if subject.train and dtype is torch.float16:
        built.scaler = torch.amp.GradScaler(kind)
        built.how += " with GradScaler"
    return _finished(built, subject)


def _converted(subject: BenchSetup, *, compiled: bool, folded: bool = True) -> ModeRunner:
    how = f"policy {subject.rules.name}, {subject.form.name}"
    if subject.train:
        model = _copy(subject)
        optimizer = make_optimizer(subject.source, model)
        weights = subject.rules.file.weights
        lowered = {} if is_master_free(subject.rules) else stored_dtypes(model, weights, subject.low_dtype)
        made = prepare(model, optimizer, policy=subject.rules, dtype=subject.form.name, emulate=False)
        built = ModeRunner(f"{how}, ampaudit.prepare", made.model, contextlib.nullcontext)
        # torch unscales no 16-bit gradients
        scaled = made.scaler.is_enabled() and not is_master_free(subject.rules)
        built.masters = frozenset(lowered)
        built.optimizer, built.scaler = optimizer, made.scaler if scaled else None
        if compiled:
            raise NotSupported("a prepared model traces itself: it cannot be compiled again")
        return built
    batch = subject.source.batches[0]
    traced, _ = trace_under(subject.source, subject.rules, subject.form, subject.device, subject.seed)
    changed = convert(traced)
    graph = fold_casts(changed, "inference" if folded else "train")
    values = {name: t.to(subject.device) for name, t in folded_weights(changed, graph, {}).items()}
    model = GraphModel(graph, values, traced.outputs, train=False).eval()
    built = ModeRunner(f"{how}, casts folded into the weights", model, contextlib.nullcontext)
    if compiled:
        built.model, built.how = torch.compile(model), f"{built.how}, torch.compile"  # type: ignore[assignment]
        try:
            built.forward(moved(batch, subject.device))
        except Exception as error:
            raise NotSupported(
                f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
    return built


def _check_tf32(device: torch.device) -> None:
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        raise NotSupported("TF32 needs an NVIDIA GPU of compute capability 8.0 or later")
