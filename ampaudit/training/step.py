"""Builds a model with its loss, optimizer and scaler, and runs training steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from ampaudit.core.errors import InputError, UsageError
from ampaudit.policy import RuleSet
from ampaudit.run.guards import naming_indices
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import LossAndOutput
from ampaudit.trace.loss import WithLoss, item_apart
from ampaudit.trace.structure import structural_copy
from ampaudit.training.prepare import How, prepare

__all__ = [
    "TrainingStep",
    "make_optimizer",
    "model_with_loss",
    "optimizer_state",
    "prepare_step",
]


@dataclass
class TrainingStep:
    """A model with its optimizer, and the parts of one step.

    Attributes:
        model: gives a loss and an output; from ``model_with_loss``, prepared or not.
        optimizer: of its parameters.
        scaler: of the loss, if there is one.
        context: entered around each forward pass.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def inner(self) -> nn.Module:
        """The model without the wrappers of ``prepare``."""
        model: nn.Module = getattr(self.model, "original", self.model)
        return model

    def forward(self, batch: Batch) -> LossAndOutput:
        """Run the forward pass."""
        item = item_apart(batch.args, batch.kwargs, batch.whole)
        with self.context(), naming_indices(batch):
            result: LossAndOutput = self.model(batch.args, batch.kwargs, item)
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the loss, scaled if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        """Step the optimizer, unless the scaler skips it."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def model_with_loss(source: ModelSource, device: torch.device) -> nn.Module:
    """Return a copy of a source's model together with its loss, ready to train."""
    return WithLoss(structural_copy(source.model), source.loss).to(device).train()


def prepare_step(
    source: ModelSource,
    device: torch.device,
    rules: RuleSet,
    dtype: str,
    *,
    how: How = "graph",
    emulate: bool = False,
    loss_scale: str | float | None = None,
) -> TrainingStep:
    """Prepare a copy of a source's model to train under a policy."""
    model = model_with_loss(source, device)
    optimizer = make_optimizer(source, model)
    prepared = prepare(
        model, optimizer, policy=rules, dtype=dtype, loss_scale=loss_scale, how=how, emulate=emulate
    )
    return TrainingStep(prepared.model, optimizer, prepared.scaler if prepared.scaler.is_enabled() else None)


def make_optimizer(source: ModelSource, model: nn.Module) -> torch.optim.Optimizer:
    """Create the model file's own optimizer, or AdamW.

    Raises:
        InputError, UsageError: there is nothing to train, or it is no optimizer that steps once a batch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("no parameter of the model requires a gradient", hint="call requires_grad_()")
    with calling_user_code("optimizer(params)"):
        optimizer = source.optimizer(parameters) if source.optimizer is not None else None
    if optimizer is None:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer(params) returned {type(optimizer).__name__}", hint="return a torch optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS calls the model itself, and torch's GradScaler cannot scale that")
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]
