"""Copies a model without its weights: every module and attribute, with fake tensors as parameters.

Tracing the copy leaves the user's model untouched, costs no memory for weights, and lets the
parameters have the dtype in which the policy stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ampaudit.core.errors import TraceFailed, first_line
from ampaudit.trace.internals import FakeTensorMode
from ampaudit.trace.structure import structural_copy

__all__ = [
    "FakeModel",
    "constant_masters",
    "fake_like",
    "make_fake_model",
    "named_tensors",
    "without_cache",
    "without_data",
]


class FakeModel(NamedTuple):
    """The copy, and the gradient hooks of its parameters by name."""

    model: nn.Module
    hooks: dict[str, list[Callable[..., Any]]]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, tied ones under each of their names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def without_data(model: nn.Module, convert: Callable[[nn.Module], object]) -> nn.Module:
    """Copy a model without the data of its parameters and buffers, and convert the copy.

    Raises:
        TraceFailed: The method needs data, or fails.
    """
    empty: dict[int, torch.Tensor] = {}
    for tensor in named_tensors(model).values():
        if id(tensor) not in empty:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
    clone = structural_copy(model, empty)
    try:
        convert(clone)
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} cannot be converted on a copy without data: {first_line(error)}",
            hint="choose a policy that does not call the model's own method, such as apex-o2",
        ) from error
    return clone


def make_fake_model(
    model: nn.Module,
    mode: FakeTensorMode,
    dtypes: Mapping[str, torch.dtype],
    convert: Callable[[nn.Module], object] | None = None,
    *,
    trained: bool = False,
    hooked: bool = False,
) -> FakeModel:
    """Copy a model with fake tensors as its parameters and buffers.

    Args:
        model: The user's model; not changed.
        mode: The fake mode that the trace will use.
        dtypes: Dtypes of stored parameters and buffers by name; the others keep theirs.
        convert: The model's own method that converts it to 16 bits, if the policy calls one: the copy gets
            its other effects as well.
        trained: Whether parameters keep ``requires_grad``.
        hooked: Whether to copy the hooks of parameters.
    """
    originals = named_tensors(model)
    source = model if convert is None else without_data(model, convert)
    fakes: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(source).items():
        if id(tensor) not in fakes:
            original = originals.get(name, tensor)
            fake = fake_like(original, mode, dtypes.get(name, original.dtype))
            requires_grad = trained and original.requires_grad and fake.is_floating_point()
            fakes[id(tensor)] = (
                nn.Parameter(fake, requires_grad) if isinstance(tensor, nn.Parameter) else fake
            )
    if not hooked:
        result = FakeModel(structural_copy(source, fakes), {})
    else:
        hooks = {name: list((tensor._backward_hooks or {}).values()) for name, tensor in originals.items()}
        copied = structural_copy(_WithHooks(source, {n: h for n, h in hooks.items() if h}), fakes)
        result = FakeModel(copied.model, copied.hooks)
    without_cache(result.model)
    return result


class _WithHooks(nn.Module):
    """Holds a model and the hooks of its parameters for one copy: they may share objects."""

    def __init__(self, model: nn.Module, hooks: dict[str, list[Any]]) -> None:
        super().__init__()
        self.model = model
        self.hooks = hooks


def constant_masters(model: nn.Module, copy: nn.Module) -> dict[int, torch.Tensor]:
    """Map each unregistered tensor that the copy's conversion has cast, by identity, to the original."""
    masters: dict[int, torch.Tensor] = {}
    for theirs, ours in zip(model.modules(), copy.modules(), strict=False):
        for name, tensor in vars(ours).items():
            master: Any = vars(theirs).get(name)
            tensors = isinstance(tensor, torch.Tensor) and isinstance(master, torch.Tensor)
            if tensors and tensor.dtype != master.dtype and tensor.shape == master.shape:
                masters[id(tensor)] = master
    return masters


def fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Make a fake tensor with the shape, strides and (by default) device of another one."""
    with mode:
        return torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=dtype, device=device or tensor.device
        )


def without_cache(copy: nn.Module) -> None:
    """Switch off generation caches, which a single pass does not need and export does not support."""
    for module in copy.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
