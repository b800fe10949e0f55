"""Joins a model and its loss in one module, so that the policy applies to the loss's ops as well."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError
from ampaudit.trace.entry import ENTRY_NAME, LossAndOutput, placed, tensor_leaves
from ampaudit.trace.values import dtype_name

LOSS_BATCH = "batch of the loss"  # keyword of a model with its loss, which no parameter of a model can have
_DEFINE = "define loss(output) or loss(output, batch), which returns one number"


@dataclass(frozen=True, slots=True)
class _InputReference:
    """A reference, in a batch, to one of the model's input tensors."""

    index: int


def with_input_references(args: tuple[Any, ...], kwargs: dict[str, Any], item: Any) -> Any:
    """Replace tensors of a batch that are model inputs by references, so that no input occurs twice."""
    inputs = {id(tensor): _InputReference(index) for index, tensor in enumerate(tensor_leaves(args, kwargs))}
    return pytree.tree_map(lambda leaf: inputs.get(id(leaf), leaf), item)


class WithLoss(nn.Module):
    """Calls the model and then the loss, whose ops are layer ``loss``; layers keep their names.

    The loss is ``loss(output)`` or ``loss(output, batch)``, or ``None`` where the output is, or has, one. The
    batch, from ``with_input_references``, is the keyword ``LOSS_BATCH``; the other arguments are the model's.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        setattr(self, ENTRY_NAME, model)
        self.loss = _Loss(loss)
        self.training = model.training
        self.output_dtype: torch.dtype | None = None  # of the model's outputs, before the loss

    @property
    def inner(self) -> nn.Module:
        """The user's model."""
        model: nn.Module = getattr(self, ENTRY_NAME)
        return model

    def forward(self, *args: Any, **kwargs: Any) -> LossAndOutput:
        """Return the output and a scalar loss."""
        item = kwargs.pop(LOSS_BATCH)
        inputs = tensor_leaves(args, kwargs)
        output = placed(self.inner(*args, **kwargs), self.output_dtype)
        item = pytree.tree_map(
            lambda leaf: inputs[leaf.index] if isinstance(leaf, _InputReference) else leaf, item
        )
        return LossAndOutput(self.loss(output, item), output)


class _Loss(nn.Module):
    def __init__(self, function: Callable[..., Any] | None) -> None:
        super().__init__()
        self._function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loss:
        """Share the user's function instead of copying it."""
        clone = _Loss(self._function)
        clone.training = self.training
        return clone

    def forward(self, output: Any, item: Any) -> torch.Tensor:
        return call_loss(self._function, output, item)


def takes_batch(function: Callable[..., Any]) -> bool:
    """Return whether a loss or metric takes the batch as its second argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = [p for p in positional if p.default is p.empty]
    has_batch = len(positional) > 1 and positional[1].name == "batch"
    return (
        len(required) >= 2 or has_batch or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    )


def _check_signature(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError(f"loss() cannot be called: {error}", hint=_DEFINE) from error


def call_loss(function: Callable[..., Any] | None, output: Any, item: Any) -> torch.Tensor:
    """Compute the scalar loss of an output.

    Raises:
        InputError: There is none, it takes other arguments, or it is not a differentiable number.
    """
    if function is not None:
        arguments = (output, item) if takes_batch(function) else (output,)
        with contextlib.suppress(ValueError):  # a function in C has no signature
            _check_signature(function, arguments)
        loss = function(*arguments)
        what = "loss(output) returned"
    else:
        loss = _loss_in(output)
        what = "there is no loss(output), and the model returns"
    hint = (
        "return a tensor with one number, such as F.cross_entropy(output, batch['labels']), not its .item()"
    )
    if function is None:
        hint = f"{_DEFINE}, or pass loss="
    if not isinstance(loss, torch.Tensor):
        kind = "float" if isinstance(loss, torch.SymFloat) else type(loss).__name__
        raise InputError(f"{what} {kind}", hint=hint)
    if loss.numel() != 1 or not loss.is_floating_point():
        shape = "x".join(map(str, loss.shape)) or "a scalar"
        raise InputError(f"{what} {shape} of {dtype_name(loss.dtype)}", hint=hint)
    return loss if loss.dim() == 0 else loss.reshape(())


def _loss_in(output: Any) -> Any:
    """Return the output itself, or its ``loss``, as in Transformers' models with labels."""
    if isinstance(output, torch.Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list) and len(output) == 1:
        return output[0]
    return output if loss is None else loss
