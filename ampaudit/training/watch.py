"""Watches an existing training loop through the hooks of torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.audit.inputs import check_trained
from ampaudit.core.errors import UsageError
from ampaudit.core.formats import Dtype
from ampaudit.core.text import plural
from ampaudit.report.training import Health, TrainingReport
from ampaudit.trace.entry import layer_path
from ampaudit.training.model_proxy import ModelProxy
from ampaudit.training.optimizer_monitor import LoopFormat, OptimizerMonitor, WrittenState
from ampaudit.training.prepare import parameters_of


class TrainingMonitor:
    """Records the health of a training loop, from ``watch`` to ``close`` or the end of the ``with`` block.

    It records the scale of each step and whether it was skipped, and on every k-th step also gradients,
    updates and states. The loop is not changed: hooks of the optimizer see each step, hooks of its parameters
    each backward pass, and the scaler's ``step`` is wrapped. Numbers stay on the device until ``health``.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[OptimizerMonitor], low: LoopFormat) -> None:
        self._model, self._optimizers, self._low = model, optimizers, low

    def __repr__(self) -> str:
        names = ", ".join(type(monitor.optimizer).__name__ for monitor in self._optimizers)
        return f"<{type(self).__name__} {plural(self.step, 'step')} of {names}>"

    def __enter__(self) -> TrainingMonitor:
        """Go on watching."""
        for monitor in self._optimizers:
            monitor.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; the record stays."""
        for monitor in reversed(self._optimizers):
            monitor.close()
        self._low.settle()

    def loss(
        self,
        value: torch.Tensor | float,
        *,
        step: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Record the unscaled loss of a step, at any place in the loop.

        A tensor belongs to the step that follows its forward pass. A number has no graph: record it before
        the next forward pass. If one backward pass goes through several losses, record tensors. Several
        losses of one step, as in gradient accumulation, are averaged.

        Args:
            value: Unscaled loss, one number.
            step: Number of its step, if known.
            optimizer: Optimizer that minimizes the loss, if several are watched; by default all of them.
        """
        for monitor in self._optimizers if optimizer is None else [self._of(optimizer)]:
            monitor.record_loss(value, step)

    @property
    def step(self) -> int:
        """The number of the current step, from 0, of the first optimizer."""
        return self._optimizers[0].losses.step

    def step_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer's current step, from 0."""
        return self._of(optimizer).losses.step

    def backwards_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of times that backward passes added to gradients of an optimizer's parameters."""
        return self._of(optimizer).losses.backwards

    def _of(self, optimizer: torch.optim.Optimizer) -> OptimizerMonitor:
        for monitor in self._optimizers:
            if monitor.optimizer is _unwrapped(optimizer):
                return monitor
        raise UsageError("this optimizer is not watched", hint="pass it to ampaudit.watch")

    def latest(self) -> dict[str, float | torch.Tensor]:
        """Return the numbers of the last watched step, on the device, for a logger."""
        if len(self._optimizers) == 1:
            return self._optimizers[0].latest()
        return {
            f"{name}/{index}": value
            for index, monitor in enumerate(self._optimizers)
            for name, value in monitor.latest().items()
        }

    def health(self, optimizer: int = 0) -> Health:
        """Fetch the record of one optimizer."""
        return self._optimizers[optimizer].health()

    def report(self) -> TrainingReport:
        """Build the report of this loop."""
        from ampaudit.training.findings import watched_report

        loops = [(monitor.optimizer, monitor.health()) for monitor in self._optimizers]
        notes = dict.fromkeys(note for monitor in self._optimizers for note in monitor.notes())
        if self._low.reason:
            notes[f"judged by {self._low.form.name}, {self._low.reason}"] = None
        return watched_report(self._model, loops, tuple(notes))

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the report of this loop in the format of the file's suffix, such as .json or .html.

        Raises:
            OutputError: The file cannot be written; a note names the file that keeps the report instead.
        """
        self.report().save(path, force=force)

    def tensorboard(self, directory: Path | str, *, force: bool = False) -> None:
        """Write this loop's TensorBoard summaries to a folder; see ``training.tensorboard``."""
        from ampaudit.training.tensorboard import write_summaries

        write_summaries(self.report(), Path(directory), force=force)


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scaler: Any = None,
    *,
    every: int = 10,
    dtype: Dtype | None = None,
) -> TrainingMonitor:
    """Watch a training loop: ``with ampaudit.watch(model, optimizer, scaler) as monitor: ...``.

    Without ``with``, call the monitor's ``close`` when the loop has ended.

    Args:
        model: Model whose parameters are optimized; it may be prepared, compiled, or wrapped by DDP.
        optimizer: Optimizer that the loop steps, or several.
        scaler: GradScaler of the loop, if it has one. By default it is found in the first step that it does
            not skip; earlier steps are missing from the record.
        every: Interval of measured steps; in the others, only backward passes are counted.
        dtype: 16-bit format to judge weights, gradients and states by; by default that of the parameters, or
            else of autocast.

    Returns:
        The monitor, a context manager.

    Raises:
        UsageError: The optimizer belongs to another model, or ``every`` is less than 1.
    """
    return watch_as(model, optimizer, scaler, every, dtype)


def watch_as(
    model: nn.Module, optimizer: Any, scaler: Any, every: int, dtype: Dtype | None, reason: str = ""
) -> TrainingMonitor:
    """Watch a training loop, with the source of its format for the report."""
    if every < 1:
        raise UsageError("every must be at least 1")
    check_trained(model, None)
    *wrappers, inner = _wrapped(model)
    if any(isinstance(p, nn.UninitializedParameter) for p in inner.parameters()):
        raise UsageError(
            "the model has lazy layers without a shape yet",
            hint="call it once on its inputs, and make the optimizer afterwards",
        )
    names = {id(p): layer_path(name) for name, p in inner.named_parameters()}
    optimizers = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    for one in optimizers:
        _check_optimizer(_unwrapped(one), names)
    if not optimizers:
        raise UsageError("there is no optimizer to watch")
    prepared = next((wrapper for wrapper in wrappers if isinstance(wrapper, ModelProxy)), None)
    if dtype is None and prepared is not None:
        dtype, reason = prepared.low_dtype, "the format that the model is prepared for"
    low, state = LoopFormat(inner, dtype, reason), WrittenState(inner)
    monitors = [
        OptimizerMonitor(_unwrapped(o), _scaler(scaler, o), names, every, low, state) for o in optimizers
    ]
    return TrainingMonitor(inner, monitors, low)


def _wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the models that it wraps, such as inside ``prepare``, DDP or ``torch.compile``."""
    yield model
    inner = getattr(model, "module", getattr(model, "_orig_mod", None))
    if isinstance(model, ModelProxy):
        inner = model.original
    if isinstance(inner, nn.Module):
        yield from _wrapped(inner)


def _unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside wrappers such as Accelerate's and Lightning's."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _check_optimizer(optimizer: Any, names: dict[int, str]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise UsageError(f"{kind} is not a torch optimizer", hint="make the optimizer first, and pass it")
    if not any(id(p) in names for p in parameters_of(optimizer)):
        raise UsageError(
            "the optimizer holds no parameter of the model", hint="pass the model that it was made from"
        )


def _scaler(scaler: Any, optimizer: Any) -> Any:
    """Return the scaler that steps an optimizer, by default Accelerate's; ``None`` if it is disabled."""
    scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
    if scaler is None:
        return None
    if not hasattr(scaler, "is_enabled") or not hasattr(scaler, "step"):
        raise UsageError(
            f"{type(scaler).__name__} is not a torch GradScaler", hint="pass the GradScaler inside it"
        )
    return scaler if scaler.is_enabled() else None
