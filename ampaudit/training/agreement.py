"""Lets processes that hold parts of a model's gradients agree whether one of them is inf or NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ampaudit.core.errors import RunFailed, UsageError, first_line

__all__ = ["agree", "own_part", "own_parts", "parameters_of", "process_groups"]


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's own part of a sharded tensor, without its graph but with its memory."""
    given: Any = tensor.detach()
    part: torch.Tensor = given.to_local() if isinstance(given, DTensor) else given
    return part


def own_parts(optimizer: Any) -> Any:
    """Return what GradScaler reads of an optimizer, with this process's own part of each sharded gradient.

    Of gradients that stand together, torch checks whole and sharded ones only apart, and looks at the first
    one's sharding for all.
    """
    parts = [_stand_in(p) if isinstance(p.grad, DTensor) else p for p in parameters_of(optimizer)]
    return SimpleNamespace(param_groups=[{"params": parts}])


def _stand_in(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    made = own_part(parameter.grad)
    made.grad = own_part(parameter.grad)
    return made


def process_groups(optimizer: Any) -> list[Any]:
    """Return the groups of processes that hold shards of an optimizer's parameters."""
    meshes = dict.fromkeys(p.device_mesh for p in parameters_of(optimizer) if isinstance(p, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def agree(
    found: dict[torch.device, torch.Tensor], groups: Sequence[Any], device: torch.device
) -> torch.Tensor:
    """Make each process's verdict that of all, in place.

    Args:
        found: by device, 1 if a gradient is inf or NaN; empty if this process has no gradients, and filled if
            another has some.
        groups: that agree, one after another; ``True`` for all processes.
        device: on which they do.

    Returns:
        The verdict of each rank.

    Raises:
        RunFailed: a process is gone.
        UsageError: there are no groups yet.
    """
    if not dist.is_initialized():
        raise UsageError(
            "the scaler has a group, but this process is in none",
            hint="call torch.distributed.init_process_group first, or leave out group=",
        )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    told = torch.zeros(ranks + 1, device=device)  # last: whether anybody has gradients
    if found:
        told[rank] = torch.stack([verdict.to(device) for verdict in found.values()]).amax()
        told[ranks] = 1.0
    for group in groups:
        _all_reduce(told, group)
    if not found and told[ranks]:
        found[device] = torch.zeros((), device=device)
    for verdict in found.values():
        verdict.copy_(told[:ranks].amax())
    return told[:ranks]


def _all_reduce(told: torch.Tensor, group: Any) -> None:
    try:
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=None if group is True else group)
    except (RuntimeError, dist.DistBackendError) as error:
        raise RunFailed(
            f"a process of the group is gone: they could not agree about this step ({first_line(error)})",
            hint="read the other ranks' output; restart from the last checkpoint",
        ) from error
