"""The built-in step of diffusion models: a scheduler makes the next sample from the model's output."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, UsageError
from ampaudit.source.interface import Batch
from ampaudit.trace.entry import flatten_outputs, named_inputs

__all__ = ["DiffusionSteps", "is_scheduler"]

_TIMES = ("timestep", "timesteps", "t", "time", "sigma", "sigmas")


def is_scheduler(value: Any) -> bool:
    """Return whether this is a scheduler as in Diffusers, with ``step`` and ``timesteps``."""
    return callable(getattr(value, "step", None)) and hasattr(value, "timesteps")


class DiffusionSteps:
    """Makes the next sample with ``scheduler.step(output, timestep, sample)``.

    The sample is the first floating-point input with two dimensions or more; the timestep the input of that
    name, or the first other input that is a number or a vector.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = copy.deepcopy(scheduler)  # it counts its steps
        self._done = 0
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None  # the last sample, scaled and unscaled

    def first(self, batch: Batch, steps: int) -> Batch:
        """Return a batch with the first timestep in it.

        Raises:
            InputError: no input is a sample, or none a timestep.
            UsageError: the scheduler has fewer timesteps than steps.
        """
        known = len(self._scheduler.timesteps)
        if known < steps:
            raise UsageError(
                f"--steps {steps}: the scheduler has {known} timesteps",
                hint=f"call its set_timesteps({steps}), or ask for fewer steps",
            )
        leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
        sample, time = _places(batch)
        self._fill(leaves, sample, time, leaves[sample])
        return Batch(*pytree.tree_unflatten(leaves, spec))

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """Return the inputs with the next sample and timestep in them."""
        leaves, spec = pytree.tree_flatten(inputs)
        whole = inputs if isinstance(inputs, tuple) else (inputs,)
        batch = Batch((), inputs) if isinstance(inputs, dict) else Batch(whole)
        sample, time = _places(batch)
        output = next(tensor for _, tensor in flatten_outputs(outputs))
        stepped = self._scheduler.step(output, self._timestep, self._unscaled(leaves[sample]))
        found = stepped if isinstance(stepped, torch.Tensor) else getattr(stepped, "prev_sample", None)
        found = stepped[0] if found is None else found
        self._done += 1
        self._fill(leaves, sample, time, found)
        return pytree.tree_unflatten(leaves, spec)

    @property
    def _timestep(self) -> torch.Tensor:
        times = self._scheduler.timesteps
        return torch.as_tensor(times[min(self._done, len(times) - 1)])

    def _fill(self, leaves: list[Any], sample: int, time: int, made: torch.Tensor) -> None:
        scale = getattr(self._scheduler, "scale_model_input", None)
        scaled = made if scale is None else scale(made, self._timestep)
        self._made = scaled, made
        leaves[sample] = scaled
        shape = leaves[time].shape if isinstance(leaves[time], torch.Tensor) else ()
        leaves[time] = self._timestep.to(made.device).expand(shape).clone()

    def _unscaled(self, given: torch.Tensor) -> torch.Tensor:
        """Return the sample that an input was scaled from; of one that was repaired, by division."""
        if self._made is not None and torch.equal(self._made[0], given):
            return self._made[1]
        scale = getattr(self._scheduler, "scale_model_input", None)
        return given if scale is None else given / scale(torch.ones_like(given), self._timestep)


def _places(batch: Batch) -> tuple[int, int]:
    """Return the numbers of the leaves that are sample and timestep."""
    named = named_inputs(batch.args, batch.kwargs)
    samples = [i for i, (_, leaf) in enumerate(named) if _is_sample(leaf)]
    if not samples:
        raise InputError("no input of the model is a sample", hint="give it floating-point latents")
    times = [i for i, (name, leaf) in enumerate(named) if name in _TIMES and i != samples[0]]
    times += [i for i, (_, leaf) in enumerate(named) if i != samples[0] and _is_number(leaf)]
    if not times:
        raise InputError("no input of the model is a timestep", hint="give it one, such as torch.tensor(0)")
    return samples[0], times[0]


def _is_sample(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim >= 2


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim <= 1 and leaf.dtype is not torch.bool
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)
