"""Peak memory of a step: measured at torch's allocator, and predicted from a run on tensors without data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ampaudit.training.runs import state_of

__all__ = ["live_bytes", "measured_peak", "storage_bytes"]


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of parameters, buffers, gradients and optimizer state; memory that is shared counts once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return storage_bytes([*tensors, *(state_of(optimizer) if optimizer is not None else [])])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that some tensors lie in, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measured_peak(step: Callable[[], object], held: int, device: torch.device) -> int:
    """Most bytes that were allocated during a step.

    On a GPU, torch's own count. On a CPU, ``held`` bytes that were there before, and the highest sum of what
    the step allocated and freed, as torch's profiler recorded each call of the allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    return held + _profiled(step)


def _profiled(step: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of its start and end
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    results = profiler.profiler.kineto_results
    calls = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = most = 0
    for _, count in calls:
        now += count
        most = max(most, now)
    return most
