"""Records the steps of one optimizer through its own hooks and those of its scaler.

Gradient peaks cover all elements. Zeros, updates and optimizer states are measured on a sample of each
parameter, which is copied before the step.
"""

from __future__ import annotations

import inspect
import math
import statistics
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress, takewhile
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ampaudit.core.errors import UsageError
from ampaudit.core.formats import FLOAT16, Dtype, NumberFormat, format_named, low_precision_format
from ampaudit.core.text import finite_or_none, plural
from ampaudit.report.training import Health, ParameterHealth, StepRecord
from ampaudit.trace.entry import layer_path
from ampaudit.trace.values import LOW_PRECISION_DTYPES, components, dtype_name, torch_dtype
from ampaudit.training.prepare import eps_of, local_part, parameters_of

SAMPLE = 1024  # sampled elements of each parameter
_FIELDS = ("peak", "zero", "flushed", "broken", "update", "weight", "lost", "state")
_thread = threading.local()  # ``nodes``: number of autograd nodes that this thread's loss books created


class OptimizerMonitor:
    """Record scales, skipped steps and losses, and on every k-th step gradients, updates and states.

    A step ends when the optimizer steps or the scaler skips it. Numbers stay on the device until ``health``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,  # without wrappers
        scaler: Any,  # enabled loss scaler of the loop, if any
        names: Mapping[int, str],  # of the model's parameters, by identity
        every: int,
        low: LoopFormat,
        state: WrittenState,
    ) -> None:
        self.optimizer, self._scaler = optimizer, scaler
        self._every, self._low, self._state, self._all_names = every, low, state, names
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._find_parameters()
        self.losses = LossBook()  # losses by step
        self._meter = StepMeter(self._names, self._parameters, low)
        self._watched: list[int] = []
        self._scales: list[float | torch.Tensor] = []
        self._skipped: list[bool | torch.Tensor] = []
        self._skip_count: int | torch.Tensor = 0
        self._overflows: torch.Tensor | None = None  # steps with inf or NaN gradients, by rank
        self._hooked: set[int] = set()  # ids of parameters whose gradients have a hook
        self._scale: torch.Tensor | None = None  # scale while the scaler steps
        self._depth = 0  # nested step calls: a subclass's step may call its base's, and both run the hooks
        self._undo: list[Callable[[], None]] = []
        self.open()

    def open(self) -> None:
        """Start or resume recording."""
        if not self._undo:
            before = self.optimizer.register_step_pre_hook(self._before)
            after = self.optimizer.register_step_post_hook(self._after)
            self._undo += [before.remove, after.remove, self._hooked.clear]
            self._hook_gradients()
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
        """Add new parameters of the optimizer; groups may be added during the loop."""
        ids = {id(p) for p in self._parameters}
        for parameter in parameters_of(self.optimizer):
            if id(parameter) not in ids:
                name = self._all_names.get(id(parameter), f"parameter[{len(self._parameters)}]")
                self._names.append(name)
                self._parameters.append(parameter)

    def _hook_gradients(self) -> None:
        """Hook the gradients of parameters that are new or were unfrozen."""
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                handle = parameter.register_post_accumulate_grad_hook(self._add_gradient)
                self._undo.append(handle.remove)

    def _add_gradient(self, parameter: torch.Tensor) -> None:
        self.losses.add_gradient(parameter, in_closure=self._depth > 0)

    def _scaler_steps(self, step: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the scaler's step, and record whether the step was skipped."""
        if optimizer is not self.optimizer:
            return step(optimizer, *args, **kwargs)
        number = self.losses.step
        self._scale = _scale_of(self._scaler)
        result = step(optimizer, *args, **kwargs)
        # only ampaudit's own scaler reports overflows by rank
        overflow = getattr(self._scaler, "overflowed", lambda _: None)(self.optimizer)
        if overflow is not None:
            self._overflows = overflow if self._overflows is None else self._overflows + overflow
        if self.losses.step == number:
            self._end(skipped=True)
        return result

    def _find_scaler(self) -> None:
        """Adopt the scaler that is stepping the optimizer: gradients are measured relative to its scale."""
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
        self._hook_gradients()

    def latest(self) -> dict[str, float | torch.Tensor]:
        """Return the numbers of the last watched step, on the device."""
        numbers: dict[str, float | torch.Tensor] = {**self._meter.latest()}
        if self._scaler is not None and self._scales:
            numbers["loss_scale"] = self._scales[-1]
            numbers["skipped_steps"] = self._skip_count
        return numbers

    def notes(self) -> Iterator[str]:
        """Yield notes on numbers of this process only, and on the process that caused skipped steps."""
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
        eps = eps_of(self.optimizer)
        parameters = dict(zip(self._names, self._parameters, strict=True))
        stored: Counter[torch.dtype] = Counter()
        for parameter in self._parameters:
            stored[parameter.dtype] += parameter.numel()
        return Health(
            dtype=self._low.form.name,
            every=self._every,
            watched=tuple(self._watched),
            steps=tuple(
                StepRecord(step, loss, float(scale), bool(skipped), recorded)
                for step, ((recorded, loss), scale, skipped) in enumerate(
                    zip(self.losses.losses(), self._scales, self._skipped, strict=True)
                )
            ),
            parameters=tuple(
                _parameter(name, rows, parameters[name]) for name, rows in self._meter.fetched().items()
            ),
            eps=eps,
            eps_held=None if eps is None else float(torch.tensor(eps).to(torch_dtype(self._low.form))),
            storage=dtype_name(stored.most_common(1)[0][0]),
            may_flush=self._low.may_flush,
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
    """Wrap the scaler's step with a monitor, and return a function that undoes it.

    Several monitors share one wrapper.
    """
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
            return  # another wrapper around this one still calls it
        if wrapper.earlier is None:
            del scaler.step
        else:
            scaler.step = wrapper.earlier

    return undo


class StepMeter:
    """Measure watched steps of one optimizer, whose parameters have these names in order."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], low: LoopFormat) -> None:
        self._names = names
        self._parameters = parameters
        self._low = low
        self._before: dict[int, torch.Tensor] = {}
        # measured fields, and where the sample is not 0
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.steps: list[list[tuple[str, torch.Tensor]]] = []  # names, and their ``_FIELDS`` on the device

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy a sample of the weights that a step begins with."""
        self._gradients.clear()
        self._before = {
            index: _sample(local_part(parameter)).float().clone()
            for index, parameter in enumerate(self._parameters)
            if local_part(parameter).numel()
        }

    @torch.no_grad()
    def measure_gradients(self, scale: float | torch.Tensor, remaining: torch.Tensor | None = None) -> None:
        """Measure the gradients of a step with its loss scale.

        Fused optimizers divide by the ``remaining`` scale themselves.
        """
        for index in self._before:
            gradient = self._parameters[index].grad
            if gradient is None:
                continue
            gradient = components(gradient.to_dense() if gradient.is_sparse else local_part(gradient))
            unscaled = gradient if remaining is None else gradient / remaining
            self._gradients[index] = self._gradient(unscaled, scale), _sample(gradient) != 0

    def _gradient(self, gradient: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        """Measure peak and finiteness of all elements, and zeros and flushed values of a sample."""
        low, high = gradient.aminmax()
        peak = torch.maximum(low.abs(), high.abs()).float()
        sampled = _sample(gradient).float().abs()
        nonzero = sampled != 0
        flushed = nonzero & (sampled * scale <= self._low.form.flush_below)
        count = nonzero.sum()
        zero, flushed_share = 1.0 - count / sampled.numel(), flushed.sum() / count.clamp(min=1)
        return torch.stack([peak, zero, flushed_share, (~peak.isfinite()).float()])

    @torch.no_grad()
    def measure_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the step's effect on the weights, and the optimizer's second moments."""
        rows: list[tuple[str, torch.Tensor]] = []
        dtype = torch_dtype(self._low.form)
        for index, (gradient, active) in self._gradients.items():
            parameter, old = self._parameters[index], self._before[index]
            update = _sample(local_part(parameter)).float() - old
            rounded = old.to(dtype)
            intended = active | (update != 0)  # an update that is lost in 16 bits is 0
            unchanged = intended & ((rounded.float() + update).to(dtype) == rounded)
            second = optimizer.state.get(parameter, {}).get("exp_avg_sq")
            share = unchanged.sum() / intended.sum().clamp(min=1)
            measured = torch.stack([update.norm(), old.norm(), share, self._state(second, old)])
            rows.append((self._names[index], torch.cat([gradient, measured])))
        self.steps.append(rows)
        self._before.clear()
        self._gradients.clear()

    def _state(self, second: Any, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(second, torch.Tensor):
            return like.new_full((), math.nan)
        values = _sample(local_part(second)).float()
        positive = values > 0
        return (positive & (values <= self._low.form.flush_below)).sum() / positive.sum().clamp(min=1)

    def latest(self) -> dict[str, torch.Tensor]:
        """Return the numbers of the last watched step over all parameters, on the device."""
        rows = [row for _, row in self.steps[-1]] if self.steps else []
        if not rows:
            return {}
        peak, zero, flushed, _, update, weight, unchanged, _ = torch.stack(rows).unbind(1)
        return {
            "gradient_peak": peak.amax(),
            "gradient_zero": zero.mean(),
            "gradient_flushed": flushed.mean(),
            "update_ratio": (update / weight.clamp(min=torch.finfo(weight.dtype).tiny)).median(),
            "update_lost": unchanged.mean(),
        }

    def fetched(self) -> dict[str, list[dict[str, float]]]:
        """Fetch the measurements of each parameter, by step."""
        rows = [row for step in self.steps for row in step]
        numbers = torch.stack([row for _, row in rows]).tolist() if rows else []
        by_name: dict[str, list[dict[str, float]]] = {}
        for (name, _), values in zip(rows, numbers, strict=True):
            by_name.setdefault(name, []).append(dict(zip(_FIELDS, values, strict=True)))
        return by_name


def _parameter(name: str, rows: list[dict[str, float]], parameter: torch.Tensor) -> ParameterHealth:
    ratios = [
        row["update"] / row["weight"] for row in rows if row["weight"] > 0 and math.isfinite(row["update"])
    ]
    states = [row["state"] for row in rows if math.isfinite(row["state"])]
    losses = [row["lost"] for row in rows if row["zero"] < 1 or row["update"] > 0]
    return ParameterHealth(
        name=name,
        elements=parameter.numel(),
        gradient_peaks=tuple(row["peak"] if math.isfinite(row["peak"]) else None for row in rows),
        zero=_mean(row["zero"] for row in rows) or 0.0,
        flushed=_mean(row["flushed"] for row in rows) or 0.0,
        broken=int(sum(row["broken"] for row in rows)),
        update_ratio=statistics.median(ratios) if ratios else None,
        lost=_mean(losses),
        state_flushed=_mean(states),
        storage=dtype_name(parameter.dtype),
    )


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sample of the real numbers, always of the same places."""
    flat = components(tensor.detach()).reshape(-1)
    return flat if flat.numel() <= SAMPLE else flat[_places(flat.numel(), flat.device)]


@cache
def _places(count: int, device: torch.device) -> torch.Tensor:
    """Return a random place in each of ``SAMPLE`` equal parts; even steps would stay in a few columns."""
    generator = torch.Generator("cpu").manual_seed(0)
    shifts = torch.rand(SAMPLE, generator=generator, dtype=torch.float64, device="cpu")
    places = (torch.arange(SAMPLE, device="cpu") + shifts) * (count / SAMPLE)
    return places.long().clamp(max=count - 1).to(device)


@dataclass(slots=True)
class _Loss:
    """A loss of the current step, with the state of its backward pass."""

    value: torch.Tensor | float
    reached: bool = False  # a backward pass went through its graph
    added: bool = False  # the gradients contain those of its batch
    passed_over: bool = False  # another batch's loss was recorded without a backward pass in between


class LossBook:
    """The losses of a loop by step.

    A loop may record a loss before or after its backward pass, its step, or its scaler's update. A loss
    belongs to the first step that ends after its forward pass. Autograd numbers its nodes in order of
    creation, so comparing with the count at the end of each step places the forward pass. A number without a
    graph belongs to the step that just ended if autograd has recorded nothing since, or if that step has no
    loss and the loop also recorded the loss of its first step after that step's end.

    A loss is dropped if its batch contributes to no step: no backward pass went through its graph (for a
    number: none came before the next batch's loss), or its gradients were cleared before the step.
    """

    def __init__(self) -> None:
        self._values: dict[int, list[_Loss]] = {}
        self._ends: list[int] = []  # autograd's count at the end of each step
        self._last, self._others = _count()
        self._idle = True
        self._inside = -1  # step whose loss was recorded inside a closure
        self._late: bool | None = None  # whether the loop records numbers after the end of their step
        self._pending: list[_Loss] = []  # losses of the current step without a backward pass yet
        self._gradients: dict[int, ref[torch.Tensor]] = {}  # gradients of the current step, by parameter id
        self.backwards = 0  # number of additions to gradients
        self._after_backward = True  # whether losses of this step are recorded after their backward pass
        self._backwards_before = [0, 0]  # ``backwards`` at the beginning of the step, and at the last loss
        self.dropped = 0  # number of dropped losses

    @property
    def step(self) -> int:
        """The number of the current step, from 0."""
        return len(self._ends)

    def end_step(self) -> None:
        """Begin the next step."""
        self._advance()
        if self.backwards > self._backwards_before[0]:  # else the gradients come from elsewhere
            self._drop(lambda loss: loss.passed_over and not loss.reached)
        self._pending.clear()
        self._gradients.clear()
        self._backwards_before = [self.backwards] * 2
        self._after_backward = True
        self._ends.append(self._last)
        self._idle = True

    def add_gradient(self, parameter: torch.Tensor, *, in_closure: bool) -> None:
        """Record that a backward pass added to the gradient of a parameter."""
        self.backwards += 1
        gradient = parameter.grad
        if gradient is None or in_closure:
            return
        reference = self._gradients.get(id(parameter))
        # with create_graph, autograd stores a sum as a new tensor
        if reference is not None and reference() is not gradient and not gradient.requires_grad:
            self._drop(lambda loss: loss.added)
            self._gradients.clear()
        self._gradients[id(parameter)] = ref(gradient)
        for loss in self._pending:
            loss.added |= loss.reached or not loss.passed_over
        if self._pending:
            self._pending = [loss for loss in self._pending if not loss.added]

    def _drop(self, unused: Callable[[_Loss], bool]) -> None:
        """Drop unused losses of the current step."""
        losses = self._values.get(self.step, [])
        remaining = [loss for loss in losses if not unused(loss)]
        self.dropped += len(losses) - len(remaining)
        self._values[self.step] = remaining

    @property
    def idle(self) -> bool:
        """Whether autograd has recorded nothing since the last step."""
        self._advance()
        return self._idle

    def _advance(self) -> bool:
        """Return whether autograd has recorded nodes since the last call, other than those of loss books."""
        before = self._others
        self._last, self._others = _count()
        advanced = self._others != before
        self._idle &= not advanced
        return advanced

    def record(self, value: Any, step: int | None, *, in_closure: bool) -> None:
        """Record a loss, a number or a tensor with one element; a step of ``None`` is inferred.

        A closure of the optimizer may record several; only the first is that of the weights before the step.

        Raises:
            UsageError: The loss is not one number, or the step is negative.
        """
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise UsageError(f"the loss has the shape {tuple(value.shape)}", hint="record loss.mean()")
        if step is not None and step < 0:
            raise UsageError(f"step={step}", hint="steps are numbered from 0")
        new_batch = self._advance()
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        index = self._step_of(node) if step is None else step
        if in_closure:
            if self._inside == index:
                return
            self._inside = index
        loss = _Loss(value.detach().clone() if isinstance(value, torch.Tensor) else float(value))
        if step is None and index == self.step and not in_closure:
            self._follow(loss, node, new_batch=new_batch)
        self._values.setdefault(index, []).append(loss)

    def _follow(self, loss: _Loss, node: Any, *, new_batch: bool) -> None:
        """Track a loss of the current step until its backward pass."""
        # a backward pass since the last loss is this loss's, unless losses are recorded before theirs
        loss.added = self._after_backward and self.backwards > self._backwards_before[1]
        self._after_backward = loss.added
        self._backwards_before[1] = self.backwards
        if loss.added:
            return
        for earlier in self._pending if new_batch else ():
            earlier.passed_over = True
        self._pending.append(loss)
        if node is not None:
            shared = next(_next_to_leaves(node), node)  # also by values that are derived from the loss
            shared.register_prehook(lambda _: setattr(loss, "reached", True))

    def _step_of(self, node: Any) -> int:
        if node is None:
            before = self.step - 1
            if self._late is None:
                self._late = before == 0
            ended = self._idle or (self._late and not self._values.get(before))
            return max(before, 0) if ended else self.step
        step = bisect_left(self._ends, node._sequence_nr())
        # what was computed from a loss after its step is newer than its forward pass
        while step > 0 and next(_next_to_leaves(node, self._ends[step - 1]), None) is None:
            step -= 1
        return step

    def losses(self) -> Iterator[tuple[bool, float | None]]:
        """Yield for each step whether a loss was recorded, and the mean; ``None`` if it is not finite."""
        for step in range(self.step):
            values = [float(loss.value) for loss in self._values.get(step, ())]
            mean = sum(values) / len(values) if values else math.nan
            yield bool(values), finite_or_none(mean)


def _count() -> tuple[int, int]:
    """Return autograd's count of nodes in this thread, and the count without nodes of loss books."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    _thread.nodes = getattr(_thread, "nodes", 0) + 1
    number = int(node._sequence_nr())
    return number, number - _thread.nodes


def _next_to_leaves(node: Any, after: int = -1) -> Iterator[Any]:
    """Yield nodes next to a parameter that a graph reaches through sequence numbers above ``after``."""
    pending, visited = [node], {node}
    while pending:
        node = pending.pop()
        if node._sequence_nr() > after:
            following = [inner for inner, _ in node.next_functions if inner is not None]
            if any(hasattr(inner, "variable") for inner in following):
                yield node
            pending += [inner for inner in following if inner not in visited]
            visited |= set(following)


class LoopFormat:
    """The format of a loop: the caller's, that of the parameters, or that of autocast.

    Autocast is detected in the forward passes before the first measured step; the default is float16.
    """

    def __init__(self, model: nn.Module, dtype: Dtype | None, reason: str = "") -> None:
        self.form: NumberFormat = FLOAT16
        self._in_use = False  # whether the loop computes in it
        # source of the format, as it follows the format's name; empty if the user chose it
        self.reason = "by default: the loop has neither 16-bit parameters nor autocast"
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        sizes = dict.fromkeys(LOW_PRECISION_DTYPES, 0)
        for parameter in model.parameters():
            if parameter.dtype in sizes:
                sizes[parameter.dtype] += parameter.numel()
        largest = max(sizes, key=sizes.__getitem__)
        if dtype is not None:
            self.form, self.reason, self._in_use = low_precision_format(dtype), reason, True
        elif sizes[largest]:
            self.form, self.reason = format_named(dtype_name(largest)), "the format of the parameters"
            self._in_use = True
        else:
            for module in model.modules():
                if any(True for _ in module.parameters(recurse=False)):
                    self._hooks.append(module.register_forward_pre_hook(self._see))

    def _see(self, module: nn.Module, _: Any) -> None:
        kind = next(module.parameters(recurse=False)).device.type
        if torch.is_autocast_enabled(kind):
            self.form = format_named(dtype_name(torch.get_autocast_dtype(kind)))
            self.reason, self._in_use = "the format of autocast", True
            self.settle()

    @property
    def may_flush(self) -> bool:
        """Whether a gradient may be zero because of the format: bfloat16 has the range of float32."""
        return self._in_use and self.form is FLOAT16

    def settle(self) -> None:
        """Stop looking for autocast."""
        while self._hooks:
            self._hooks.pop().remove()


class WrittenState:
    """The floating-point buffers of a model that were finite when watching began.

    A step that the loss scaler skips leaves the parameters alone, but not what its forward pass has written.
    """

    def __init__(self, model: nn.Module) -> None:
        named = model.named_buffers()
        buffers = {layer_path(name): b for name, b in named if b.is_floating_point() and b.numel()}
        self._buffers = dict(compress(buffers.items(), _finite(list(buffers.values())).tolist()))
        self._measurements: list[tuple[int, torch.Tensor]] = []

    def measure(self, step: int) -> None:
        """Note which buffers are finite after a step, on their device."""
        if self._buffers:
            self._measurements.append((step, _finite(list(self._buffers.values()))))

    def broken(self) -> tuple[tuple[str, int | None], ...]:
        """Return the buffers that are inf or NaN now, with the first measured step after which they were."""
        table = [(step, finite.tolist()) for step, finite in reversed(self._measurements)]

        def since(index: int) -> int | None:
            broken = takewhile(lambda entry: not entry[1][index], table)
            return min((step for step, _ in broken), default=None)

        now = enumerate(_finite(list(self._buffers.values())).tolist())
        return tuple(
            (name, since(i)) for name, (i, holds) in zip(self._buffers, now, strict=True) if not holds
        )


@torch.no_grad()
def _finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return for each tensor whether all its elements are finite: their product with zero is zero."""
    if not tensors:
        return torch.ones(0, dtype=torch.bool)
    device = tensors[0].device
    return torch.stack([(t * 0).sum().to(device, torch.float32) == 0 for t in tensors])
