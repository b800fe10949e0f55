"""Agreement on overflow between processes that hold parts of a model's gradients."""

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
    """Return this process's local part of a sharded tensor, detached, sharing its memory."""
    local: Any = tensor.detach()
    part: torch.Tensor = local.to_local() if isinstance(local, DTensor) else local
    return part


def own_parts(optimizer: Any) -> Any:
    """Return an optimizer proxy for GradScaler with the local part of each sharded gradient.

    Torch cannot check whole and sharded gradients together: it assumes the first one's sharding for all.
    """
    parts = [_local_proxy(p) if isinstance(p.grad, DTensor) else p for p in parameters_of(optimizer)]
    return SimpleNamespace(param_groups=[{"params": parts}])


def _local_proxy(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    proxy = own_part(parameter.grad)
    proxy.grad = own_part(parameter.grad)
    return proxy


def process_groups(optimizer: Any) -> list[Any]:
    """Return the groups of processes that hold shards of an optimizer's parameters."""
    meshes = dict.fromkeys(p.device_mesh for p in parameters_of(optimizer) if isinstance(p, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def agree(
    verdicts: dict[torch.device, torch.Tensor], groups: Sequence[Any], device: torch.device
) -> torch.Tensor:
    """Combine the verdicts of all processes, in place.

    Args:
        verdicts: Scalars by device, 1 if a gradient is inf or NaN. Empty if this process has no gradients;
            filled if another one has some.
        groups: Process groups to reduce over, one after another; ``True`` for all processes.
        device: Device of the communication.

    Returns:
        The verdict of each rank, of shape (ranks,).

    Raises:
        RunFailed: A process is gone.
        UsageError: ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        raise UsageError(
            "the scaler has a group, but this process is in none",
            hint="call torch.distributed.init_process_group first, or leave out group=",
        )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    by_rank = torch.zeros(ranks + 1, device=device)  # last: whether anybody has gradients
    if verdicts:
        by_rank[rank] = torch.stack([verdict.to(device) for verdict in verdicts.values()]).amax()
        by_rank[ranks] = 1.0
    for group in groups:
        _all_reduce(by_rank, group)
    if not verdicts and by_rank[ranks]:
        verdicts[device] = torch.zeros((), device=device)
    for verdict in verdicts.values():
        verdict.copy_(by_rank[:ranks].amax())
    return by_rank[:ranks]


def _all_reduce(tensor: torch.Tensor, group: Any) -> None:
    try:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=None if group is True else group)
    except (RuntimeError, dist.DistBackendError) as error:
        raise RunFailed(
            f"a process of the group is gone: they could not agree about this step ({first_line(error)})",
            hint="read the other ranks' output; restart from the last checkpoint",
        ) from error
