"""Watches an existing training loop through the hooks of torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ampaudit.audit.inputs import check_trained
from ampaudit.core.errors import UsageError
from ampaudit.core.files import write_text
from ampaudit.core.formats import Dtype, NumberFormat, low_precision_format
from ampaudit.core.text import plural
from ampaudit.report.training import Health, StepRecord
from ampaudit.trace.entry import layer_path
from ampaudit.trace.values import dtype_name, torch_dtype
from ampaudit.training.health import StepMeter, summarize

__all__ = ["TrainingMonitor", "watch"]


class TrainingMonitor:
    """Records the health of a training loop.

    It records the scale of each step and whether it was skipped, and on every k-th step also gradients,
    updates and states. The loop is not changed: hooks of the optimizer see each step, and the scaler's
    ``update`` is wrapped. Numbers stay on the device until ``health``.

    Attributes:
        storage: the dtype of the optimizer's parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, every: int, form: NumberFormat
    ) -> None:
        inner = getattr(model, "module", model)  # DDP's, and others' that wrap
        inner = inner if isinstance(inner, nn.Module) else model
        names = {id(p): layer_path(name) for name, p in inner.named_parameters()}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in names for p in held):
            raise UsageError(
                "the optimizer holds no parameter of the model", hint="pass the model that it was made from"
            )
        self._names = [names.get(id(p), f"parameter[{index}]") for index, p in enumerate(held)]
        self._elements = {name: p.numel() for name, p in zip(self._names, held, strict=True)}
        self.storage = dtype_name(held[0].dtype)
        self._optimizer, self._scaler = optimizer, scaler
        self._every, self._form = every, form
        self._meter = StepMeter(self._names, held, form)
        self._watched: list[int] = []
        self._scales: list[float | torch.Tensor] = []
        self._losses: dict[int, torch.Tensor | float] = {}
        self._skipped: list[bool | torch.Tensor] = []
        self._step = 0
        self._stepped: bool | torch.Tensor = False
        self._undo: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {plural(self._step, 'step')} of {type(self._optimizer).__name__}>"

    def __enter__(self) -> TrainingMonitor:
        """Start watching."""
        before = self._optimizer.register_step_pre_hook(self._before)
        after = self._optimizer.register_step_post_hook(self._after)
        self._undo += [before.remove, after.remove]
        if self._scaler is not None and self._scaler.is_enabled():
            self._undo.append(self._wrap_update())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; the record stays."""
        while self._undo:
            self._undo.pop()()

    def loss(self, value: torch.Tensor | float, *, step: int | None = None) -> None:
        """Record the unscaled loss of a step, by default the current one."""
        step = self._step if step is None else step
        self._losses[step] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    @property
    def step(self) -> int:
        """The number of the current step, from 0."""
        return self._step

    def _wrap_update(self) -> Callable[[], None]:
        """Treat the scaler's update as the end of a step, skipped or not."""
        scaler, original = self._scaler, self._scaler.update

        def update(*args: Any, **kwargs: Any) -> None:
            scale = scaler._scale
            self._scales.append(scale.detach().clone() if isinstance(scale, torch.Tensor) else 1.0)
            stepped = self._stepped
            self._skipped.append(~stepped if isinstance(stepped, torch.Tensor) else not stepped)
            original(*args, **kwargs)
            self._step += 1
            self._stepped = False

        def undo() -> None:
            vars(scaler).pop("update", None)

        scaler.update = update
        return undo

    @property
    def _due(self) -> bool:
        return self._step % self._every == 0

    def _before(self, *_: Any) -> None:
        if self._due:
            scale = self._scaler._scale if self._scaler is not None and self._scaler.is_enabled() else None
            remaining = getattr(self._optimizer, "grad_scale", None)
            self._meter.before(scale if isinstance(scale, torch.Tensor) else 1.0, remaining)

    def _after(self, *_: Any) -> None:
        # a fused optimizer is called in any case, and leaves its weights alone where this is not 0
        found_inf = getattr(self._optimizer, "found_inf", None)
        self._stepped = True if found_inf is None else found_inf == 0
        if self._due:
            self._meter.after(self._optimizer)
            self._watched.append(self._step)
        if self._scaler is None or not self._scaler.is_enabled():
            self._scales.append(1.0)
            self._skipped.append(False)
            self._step += 1

    def health(self) -> Health:
        """Fetch the record."""
        eps = next((g["eps"] for g in self._optimizer.param_groups if "eps" in g), None)
        dtype = torch_dtype(self._form)
        return Health(
            dtype=self._form.name,
            every=self._every,
            watched=tuple(self._watched),
            steps=tuple(
                StepRecord(step, self._loss(step), float(scale), bool(skipped))
                for step, (scale, skipped) in enumerate(zip(self._scales, self._skipped, strict=True))
            ),
            parameters=summarize(self._meter.fetched(), self._elements),
            eps=None if eps is None else float(eps),
            eps_held=None if eps is None else float(torch.tensor(float(eps)).to(dtype)),
            storage=self.storage,
        )

    def _loss(self, step: int) -> float | None:
        value = self._losses.get(step)
        number = math.nan if value is None else float(value)
        return number if math.isfinite(number) else None

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the report of this loop as JSON."""
        from ampaudit.render.json import to_json
        from ampaudit.training.findings import watched_report

        write_text(Path(path), to_json(watched_report(self.health())), force=force)

    def tensorboard(self, directory: Path | str, *, force: bool = False) -> None:
        """Write this loop's TensorBoard summaries to a folder; see ``training.tensorboard``."""
        from ampaudit.training.findings import watched_report
        from ampaudit.training.tensorboard import write_summaries

        write_summaries(watched_report(self.health()), Path(directory), force=force)


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any = None,
    *,
    every: int = 10,
    dtype: Dtype = "float16",
) -> TrainingMonitor:
    """Watch a training loop: ``with ampaudit.watch(model, optimizer, scaler) as monitor: ...``.

    Args:
        model: the model, for the names of its parameters; it may be wrapped by DDP.
        optimizer: the optimizer that the loop steps.
        scaler: the loop's GradScaler, if it has one.
        every: measure one step in this many; the others cost nothing.
        dtype: the 16-bit format to judge weights, gradients and states by.

    Returns:
        The monitor, a context manager.

    Raises:
        UsageError: the optimizer belongs to another model, or ``every`` is less than 1.
    """
    check_trained(model, optimizer)
    if optimizer is None or every < 1:
        raise UsageError("there is no optimizer" if optimizer is None else "every must be at least 1")
    return TrainingMonitor(model, optimizer, scaler, every, low_precision_format(dtype))
