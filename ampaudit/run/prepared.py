"""What goes into the run of one batch, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ampaudit.core.sites import SiteId
from ampaudit.run.lockstep import Carried, LockStep
from ampaudit.run.meter import MeasuredValue, Meter
from ampaudit.run.observer import Pair
from ampaudit.run.propagation import FaultPropagation
from ampaudit.source.interface import Batch

__all__ = ["CallResult", "Judged", "PreparedBatch"]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready to run, the model's state before it, and what the 16-bit run carries."""

    executor: LockStep
    tensors: list[torch.Tensor]
    meter: Meter
    batch: Batch
    number: int
    model: nn.Module
    own: Carried | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A run without repairs, its measurements, and where its faults lead."""

    ready: PreparedBatch
    measured: list[MeasuredValue]
    faults: FaultPropagation

    @property
    def needs_repair(self) -> bool:
        """Whether the batch has to run again, with repairs."""
        return self.faults.need_repair


@dataclass(frozen=True, slots=True)
class CallResult:
    """The results of one call, after repairs if something broke; ``origins`` are the sites that did."""

    outputs: list[Pair]
    measured: list[MeasuredValue]
    origins: tuple[SiteId, ...] = ()
