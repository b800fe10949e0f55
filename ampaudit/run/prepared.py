"""The inputs and results of running one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ampaudit.core.sites import SiteId
from ampaudit.run.lockstep import CarriedState, LockStep
from ampaudit.run.meter import MeasuredValue, Meter
from ampaudit.run.observer import Pair
from ampaudit.run.propagation import FaultPropagation
from ampaudit.source.interface import Batch

__all__ = ["CallResult", "PreparedBatch", "UnrepairedRun"]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready to run, with the model's state and what the 16-bit run carries over."""

    executor: LockStep
    tensors: list[torch.Tensor]
    meter: Meter
    batch: Batch
    number: int
    model: nn.Module
    carried: CarriedState | None = None


@dataclass(frozen=True, slots=True)
class UnrepairedRun:
    """The measurements of a run without repairs, and how its faults propagate."""

    ready: PreparedBatch
    measured: list[MeasuredValue]
    faults: FaultPropagation


@dataclass(frozen=True, slots=True)
class CallResult:
    """The results of one call, after repairs; ``origins`` are the sites that broke by their own fault."""

    outputs: list[Pair]
    measured: list[MeasuredValue]
    origins: tuple[SiteId, ...] = ()
