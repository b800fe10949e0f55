"""Records the steps of one optimizer through its hooks, and its scaler's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ampaudit.core.text import plural
from ampaudit.report.training import Health, StepRecord
from ampaudit.trace.values import dtype_name, torch_dtype
from ampaudit.training.health import StepMeter, summarize
from ampaudit.training.loop_format import LoopFormat
from ampaudit.training.losses import LossBook
from ampaudit.training.written_state import WrittenState

__all__ = ["OptimizerMonitor"]


class OptimizerMonitor:
    """Records scales, skipped steps and losses, and on every k-th step gradients, updates and states.

    A step ends when the optimizer has stepped, or the scaler has left it out. Numbers stay on the device
    until ``health``.

    Args:
        optimizer: torch's, without wrappers.
        scaler: the loop's, if it has an enabled one.
        names: of the model's parameters, by identity.
        every: measure one step in this many.
        low: the 16-bit format that the loop is judged by.
        state: what forward passes write.

    Attributes:
        storage: the dtype of the optimizer's parameters.
        losses: by step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        names: Mapping[int, str],
        every: int,
        low: LoopFormat,
        state: WrittenState,
    ) -> None:
        self.optimizer, self._scaler = optimizer, scaler
        self._every, self._low, self._state, self._all_names = every, low, state, names
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._find_parameters()
        self.storage = dtype_name(self._parameters[0].dtype)
        self.losses = LossBook()
        self._meter = StepMeter(self._names, self._parameters, low)
        self._watched: list[int] = []
        self._scales: list[float | torch.Tensor] = []
        self._skipped: list[bool | torch.Tensor] = []
        self._skip_count: int | torch.Tensor = 0
        self._overflows: torch.Tensor | None = None  # steps in which each rank's gradients were inf or NaN
        self._heard: set[int] = set()  # parameters whose gradients are followed
        self._scale: torch.Tensor | None = None  # while the scaler steps
        self._depth = 0  # a subclass's step may call its base's, and both run the hooks
        self._undo: list[Callable[[], None]] = []
        self.open()

    def open(self) -> None:
        """Start recording, or go on."""
        if not self._undo:
            before = self.optimizer.register_step_pre_hook(self._before)
            after = self.optimizer.register_step_post_hook(self._after)
            self._undo += [before.remove, after.remove, self._heard.clear]
            self._hear_gradients()
            if self._scaler is not None:
                self._undo.append(_wrap_step(self._scaler, self._scaler_steps))

    def close(self) -> None:
        """Stop recording; the record stays."""
        while self._undo:
            self._undo.pop()()

    def record_loss(self, value: Any, step: int | None) -> None:
        """Record a loss of the loop."""
        self.losses.record(value, step, in_closure=self._depth > 0)

    def _find_parameters(self) -> None:
        """Add the optimizer's parameters that are not known yet; groups may be added later."""
        known = {id(p) for p in self._parameters}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    name = self._all_names.get(id(parameter), f"parameter[{len(self._parameters)}]")
                    self._names.append(name)
                    self._parameters.append(parameter)

    def _hear_gradients(self) -> None:
        """Follow the gradients of parameters that are new, or frozen no longer."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._heard:
                    self._heard.add(id(parameter))
                    handle = parameter.register_post_accumulate_grad_hook(self._add_gradient)
                    self._undo.append(handle.remove)

    def _add_gradient(self, parameter: torch.Tensor) -> None:
        self.losses.add_gradient(parameter, in_closure=self._depth > 0)

    def _scaler_steps(self, step: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a step that the scaler leaves out."""
        if optimizer is not self.optimizer:
            return step(optimizer, *args, **kwargs)
        number = self.losses.step
        self._scale = _scale_of(self._scaler)
        result = step(optimizer, *args, **kwargs)
        self._count_overflows(getattr(self._scaler, "overflowed", None))
        if self.losses.step == number:
            self._end(skipped=True)
        return result

    def _count_overflows(self, overflowed: Callable[[Any], torch.Tensor | None] | None) -> None:
        """Count the ranks that have made all skip the step, as ampaudit's own scaler tells them."""
        found = None if overflowed is None else overflowed(self.optimizer)
        if found is not None:
            self._overflows = found if self._overflows is None else self._overflows + found

    def _find_scaler(self) -> None:
        """Adopt the scaler that is stepping the optimizer: without its scale, gradients look too small."""
        scaler = next((o for o in _callers() if isinstance(o, torch.amp.GradScaler) and o.is_enabled()), None)
        if scaler is not None:
            self._scaler, self._scale = scaler, _scale_of(scaler)
            self._undo.append(_wrap_step(scaler, self._scaler_steps))

    @property
    def _due(self) -> bool:
        return self.losses.step % self._every == 0

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # after an exception in a step there was no post hook, and a forward pass since
        self._depth = self._depth + 1 if self._depth and self.losses.idle else 1
        if self._depth == 1 and self._scaler is None and self.losses.step == 0:
            self._find_scaler()
        if self._depth > 1 or not self._due:
            return None
        self._find_parameters()
        self._meter.copy_weights()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if closure is None:
            self._measure()
            return None
        first = True

        def measured() -> Any:
            nonlocal first
            loss = closure()
            if first:  # at the weights that the step begins with
                self._measure()
            first = False
            return loss

        if len(args) > 1:
            return (args[0], measured, *args[2:]), kwargs
        return args, {**kwargs, "closure": measured}

    def _measure(self) -> None:
        self._low.settle()
        scale = 1.0 if self._scale is None else self._scale
        self._meter.measure_gradients(scale, getattr(self.optimizer, "grad_scale", None))

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            self._depth = max(self._depth, 0)
            return
        # a fused optimizer is called in any case, and leaves its weights alone where this is not 0
        found_inf = getattr(self.optimizer, "found_inf", None)
        if self._due:
            self._meter.measure_updates(self.optimizer)
            self._watched.append(self.losses.step)
        self._end(skipped=False if found_inf is None else found_inf != 0)

    def _end(self, *, skipped: bool | torch.Tensor) -> None:
        self._scales.append(1.0 if self._scale is None else self._scale)
        self._scale = None
        if skipped is True or self._due:
            self._state.measure(self.losses.step)
        self._skipped.append(skipped)
        self._skip_count = self._skip_count + skipped
        self.losses.end_step()
        self._hear_gradients()

    def latest(self) -> dict[str, float | torch.Tensor]:
        """Return the numbers of the last watched step, on the device."""
        found: dict[str, float | torch.Tensor] = {**self._meter.latest()}
        if self._scaler is not None and self._scales:
            found["loss_scale"] = self._scales[-1]
            found["skipped_steps"] = self._skip_count
        return found

    def notes(self) -> Iterator[str]:
        """Say what of the record is of this process alone, and which process has made all skip."""
        if self._parameters and any(isinstance(parameter, DTensor) for parameter in self._parameters):
            yield (
                f"parameters are sharded: gradients, updates and states are those of the part that rank "
                f"{dist.get_rank()} of {dist.get_world_size()} holds"
            )
        counts = [] if self._overflows is None else self._overflows.tolist()
        for rank, count in enumerate(counts):
            if count:
                steps = plural(int(count), "step")
                yield f"gradients of rank {rank} were inf or NaN in {steps}: all ranks skipped"

    def health(self) -> Health:
        """Fetch the record."""
        eps = next((g["eps"] for g in self.optimizer.param_groups if "eps" in g), None)
        skipped = [bool(value) for value in self._skipped]
        scales = [float(value) for value in self._scales]
        return Health(
            dtype=self._low.form.name,
            every=self._every,
            watched=tuple(self._watched),
            steps=tuple(
                StepRecord(step, loss, scale, skip, recorded)
                for step, ((recorded, loss), scale, skip) in enumerate(
                    zip(self.losses.losses(), scales, skipped, strict=True)
                )
            ),
            parameters=summarize(
                self._meter.fetched(),
                {name: p.numel() for name, p in zip(self._names, self._parameters, strict=True)},
            ),
            eps=None if eps is None else float(eps),
            eps_held=None if eps is None else float(torch.tensor(float(eps)).to(torch_dtype(self._low.form))),
            storage=self.storage,
            dropped=self.losses.dropped,
            broken_state=self._state.broken(),
        )


def _scale_of(scaler: Any) -> torch.Tensor | None:
    scale = scaler._scale
    return scale.detach().clone() if isinstance(scale, torch.Tensor) else None


def _callers() -> Iterator[Any]:
    """Yield the objects whose methods are running, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _wrap_step(scaler: Any, monitor: Callable[..., Any]) -> Callable[[], None]:
    """Let a monitor call the scaler's step; several share one wrapper. Return what undoes it."""
    wrapper: Any = vars(scaler).get("step")
    if not hasattr(wrapper, "monitors"):
        original = scaler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            call = original
            for each in vars(step)["monitors"]:
                call = partial(each, call)
            return call(*args, **kwargs)

        vars(step).update(monitors=[], earlier=wrapper)  # which may be the loop's own wrapper
        scaler.step = wrapper = step
    wrapper.monitors.append(monitor)

    def undo() -> None:
        wrapper.monitors.remove(monitor)
        if wrapper.monitors or vars(scaler).get("step") is not wrapper:
            return  # another's wrapper around this one goes on calling it
        if wrapper.earlier is None:
            del scaler.step
        else:
            scaler.step = wrapper.earlier

    return undo
