"""Measures the health of optimizer steps on the tensors' device, without synchronizing.

Peaks of gradients are taken over all elements; zeros, updates and states of the optimizer over a sample of
each parameter, which is copied before the step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ampaudit.report.training import ParameterHealth
from ampaudit.trace.values import torch_dtype
from ampaudit.training.agreement import own_part
from ampaudit.training.loop_format import LoopFormat

__all__ = ["SAMPLE", "StepMeter", "summarize"]

SAMPLE = 1024  # elements of a parameter whose update is measured
_FIELDS = ("peak", "zero", "flushed", "broken", "update", "weight", "lost", "state")


class StepMeter:
    """Measures watched steps of one optimizer.

    Args:
        names: of the parameters, in order.
        parameters: those of the optimizer.
        low: the 16-bit format that they are judged by.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], low: LoopFormat) -> None:
        self._names = names
        self._parameters = parameters
        self._low = low
        self._before: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._active: dict[int, torch.Tensor] = {}
        self.steps: list[list[tuple[str, torch.Tensor]]] = []  # names, and their ``_FIELDS`` on the device

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy a sample of the weights that a step begins with."""
        self._gradients.clear()
        self._before = {
            index: _sample(own_part(parameter)).float().clone()
            for index, parameter in enumerate(self._parameters)
            if own_part(parameter).numel()
        }

    @torch.no_grad()
    def measure_gradients(self, scale: float | torch.Tensor, remaining: torch.Tensor | None = None) -> None:
        """Measure the gradients of the step.

        Args:
            scale: the loss scale of the step.
            remaining: the scale that the gradients still have; fused optimizers divide by it themselves.
        """
        for index in self._before:
            gradient = self._parameters[index].grad
            if gradient is None:
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else own_part(gradient)
            self._active[index] = _sample(gradient) != 0
            self._gradients[index] = self._gradient(
                gradient if remaining is None else gradient / remaining, scale
            )

    def _gradient(self, gradient: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        """Measure peak and finiteness of all elements, and zeros and flushed values of a sample."""
        low, high = gradient.aminmax()
        peak = torch.maximum(low.abs(), high.abs()).float()
        sampled = _sample(gradient).float().abs()
        nonzero = sampled != 0
        flushed = nonzero & (sampled * scale <= self._low.form.flush_below)
        count = nonzero.sum()
        zero, lost = 1.0 - count / sampled.numel(), flushed.sum() / count.clamp(min=1)
        return torch.stack([peak, zero, lost, (~peak.isfinite()).float()])

    @torch.no_grad()
    def measure_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the step's effect on the weights, and the optimizer's second moments."""
        rows: list[tuple[str, torch.Tensor]] = []
        dtype = torch_dtype(self._low.form)
        for index, gradient in self._gradients.items():
            parameter, old = self._parameters[index], self._before[index]
            update = _sample(own_part(parameter)).float() - old
            rounded = old.to(dtype)
            intended = self._active[index] | (update != 0)  # in 16 bits, what is lost has not moved at all
            lost = intended & ((rounded.float() + update).to(dtype) == rounded)
            second = optimizer.state.get(parameter, {}).get("exp_avg_sq")
            share = lost.sum() / intended.sum().clamp(min=1)
            measured = torch.stack([update.norm(), old.norm(), share, self._state(second, old)])
            rows.append((self._names[index], torch.cat([gradient, measured])))
        self.steps.append(rows)
        self._before.clear()
        self._gradients.clear()

    def _state(self, second: Any, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(second, torch.Tensor):
            return like.new_full((), math.nan)
        values = _sample(own_part(second)).float()
        positive = values > 0
        return (positive & (values <= self._low.form.flush_below)).sum() / positive.sum().clamp(min=1)

    def latest(self) -> dict[str, torch.Tensor]:
        """Return the numbers of the last watched step over all parameters, on the device."""
        rows = [row for _, row in self.steps[-1]] if self.steps else []
        if not rows:
            return {}
        peak, zero, flushed, _, update, weight, lost, _ = torch.stack(rows).unbind(1)
        return {
            "gradient_peak": peak.amax(),
            "gradient_zero": zero.mean(),
            "gradient_flushed": flushed.mean(),
            "update_ratio": (update / weight.clamp(min=torch.finfo(weight.dtype).tiny)).median(),
            "update_lost": lost.mean(),
        }

    def fetched(self) -> list[list[tuple[str, dict[str, float]]]]:
        """Fetch all measurements by step."""
        values = [row for step in self.steps for _, row in step]
        numbers = iter(torch.stack(values).tolist() if values else [])
        return [
            [(name, dict(zip(_FIELDS, next(numbers), strict=True))) for name, _ in step]
            for step in self.steps
        ]


def summarize(
    steps: Iterable[Sequence[tuple[str, dict[str, float]]]], elements: dict[str, int]
) -> tuple[ParameterHealth, ...]:
    """Summarize each parameter over the watched steps."""
    by_name: dict[str, list[dict[str, float]]] = {}
    for step in steps:
        for name, fields in step:
            by_name.setdefault(name, []).append(fields)
    return tuple(_parameter(name, rows, elements[name]) for name, rows in by_name.items())


def _parameter(name: str, rows: list[dict[str, float]], elements: int) -> ParameterHealth:
    ratios = [
        row["update"] / row["weight"] for row in rows if row["weight"] > 0 and math.isfinite(row["update"])
    ]
    states = [row["state"] for row in rows if math.isfinite(row["state"])]
    moved = [row["lost"] for row in rows if row["zero"] < 1 or row["update"] > 0]
    return ParameterHealth(
        name=name,
        elements=elements,
        gradient_peaks=tuple(row["peak"] if math.isfinite(row["peak"]) else None for row in rows),
        zero=_mean(row["zero"] for row in rows) or 0.0,
        flushed=_mean(row["flushed"] for row in rows) or 0.0,
        broken=int(sum(row["broken"] for row in rows)),
        update_ratio=statistics.median(ratios) if ratios else None,
        lost=_mean(moved),
        state_flushed=_mean(states),
    )


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements, as a view if possible."""
    flat = tensor.detach().reshape(-1)
    step = max(flat.numel() // SAMPLE, 1)
    return flat[::step][:SAMPLE]
