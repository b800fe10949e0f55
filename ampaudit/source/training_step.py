"""Gives Lightning modules that only define a training step a forward that runs it."""

from __future__ import annotations

import copy
import inspect
from itertools import islice
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import InputError, SourceError, first_line

__all__ = ["runnable", "training_batches"]

_FORWARD = "give the module a forward() that returns the loss"


def runnable(model: nn.Module, what: str) -> nn.Module:
    """Return a module that can be called and traced.

    A Lightning module without a forward is copied, with the same parameters, and its copy runs
    ``training_step`` on a batch and returns the loss.

    Raises:
        SourceError: it is a TorchScript program.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise SourceError(
            f"{what} is a TorchScript program, whose ops have no Python code to audit",
            hint="give the Python model that it was made from, or export that with torch.export.save",
        )
    base = _lightning(model)
    if base is None or type(model).forward is not base.forward or not _overrides(model, "training_step"):
        return model
    stepping = copy.copy(model)
    kind = type(model)
    methods = {"forward": _run_step, "log": _ignore, "log_dict": _ignore, "__module__": kind.__module__}
    stepping.__class__ = type(kind.__name__, (kind,), methods)
    return stepping


def training_batches(model: nn.Module, number: int) -> list[Any]:
    """Return batches of a Lightning module's own data loader; none if it has none."""
    load: Any = getattr(model, "train_dataloader", None)
    return list(islice(load(), number)) if _overrides(model, "train_dataloader") else []


def _lightning(model: nn.Module) -> Any:
    """Return Lightning's base class of a module, without importing Lightning."""
    return next((base for base in type(model).__mro__ if base.__name__ == "LightningModule"), None)


def _overrides(model: nn.Module, name: str) -> bool:
    base = _lightning(model)
    return base is not None and getattr(type(model), name) is not getattr(base, name)


def _run_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the training step on a batch and return its loss."""
    batch = kwargs if kwargs and not args else args[0] if len(args) == 1 else args
    name = type(self).__name__
    if not getattr(self, "automatic_optimization", True):
        raise InputError(f"{name} optimizes manually: its training_step needs a Trainer", hint=_FORWARD)
    given: tuple[Any, ...] = (batch, 0)
    try:
        inspect.signature(self.training_step).bind(*given)
    except TypeError:
        given = given[:1]  # it takes no index
    try:
        found = self.training_step(*given)
    except RuntimeError as error:
        if "not attached to a" not in str(error):
            raise
        raise InputError(
            f"training_step of {name} needs a Trainer: {first_line(error)}", hint=_FORWARD
        ) from error
    loss = found.get("loss") if isinstance(found, dict) else found
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"training_step of {name} returns no loss", hint=f"return the loss, or {_FORWARD}")
    return loss


def _ignore(self: Any, *args: Any, **kwargs: Any) -> None:
    """Log nothing: there is no trainer."""
